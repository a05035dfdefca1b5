"""The only place that chooses an implementation."""

from __future__ import annotations

import dataclasses

from foveal.backends.chunked import Chunked
from foveal.backends.dense import Dense
from foveal.backends.operands import Backend, Operands
from foveal.backends.splash import Splash, SplashDynamic
from foveal.checks import described

_PREFERENCE: tuple[Backend, ...] = (Splash(), Chunked(), SplashDynamic(), Dense())
"""The order in which `implementation=None` tries them."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One implementation's answer to a call.

    Attributes:
        name: what `implementation=` takes.
        runs: whether this is the one that would run.
        reason: why it would, could or cannot.
    """

    name: str
    runs: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation would run a call, and why the others would not. `print` it."""

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        """Name of the implementation that would run; None if the call would be refused."""
        return next((v.name for v in self.verdicts if v.runs), None)

    def __str__(self) -> str:
        """One line an implementation, the chosen one marked."""
        width = max(len(v.name) for v in self.verdicts)
        return "\n".join(f"{'->' if v.runs else '  '} {v.name:<{width}}  {v.reason}" for v in self.verdicts)


def names() -> tuple[str, ...]:
    """Every implementation there is."""
    return tuple(backend.name for backend in _PREFERENCE)


def named(name: str) -> Backend:
    """The implementation of that name.

    Raises:
        ValueError: there is none.
    """
    candidates, _ = _candidates(name)
    return next(backend for backend in candidates if backend.name == name)


def _candidates(implementation: str | Backend | None) -> tuple[tuple[Backend, ...], str | None]:
    """All implementations, a configured one in the place of its namesake, and the name that was asked for."""
    if isinstance(implementation, Backend):
        name = implementation.name
        return tuple(implementation if backend.name == name else backend for backend in _PREFERENCE), name
    if implementation is not None and not (isinstance(implementation, str) and implementation in names()):
        known = ", ".join(names())
        raise ValueError(f"implementation: expected None or one of {known}, got {described(implementation)}")
    return _PREFERENCE, implementation


def _in_order(candidates: tuple[Backend, ...], name: str | None) -> list[Backend]:
    """Those that may run, the best first. Linear memory first: a quadratic one is nobody's silent choice."""
    if name is not None:
        return [backend for backend in candidates if backend.name == name]
    return sorted(candidates, key=lambda backend: backend.quadratic)


def choose(operands: Operands, implementation: str | Backend | None) -> Backend:
    """The implementation that runs the call. A named one never gives way to another.

    Raises:
        ValueError: `implementation` is not the name of one.
        NotImplementedError: the named one, or every one, cannot do it; the message says why.
    """
    candidates, name = _candidates(implementation)
    for backend in _in_order(candidates, name):
        if backend.refusal(operands) is None:
            return backend
    what = "no implementation can do this" if name is None else f"{name!r} cannot do this"
    raise NotImplementedError(f"{what}:\n{explain(operands, implementation)}")


def explain(operands: Operands, implementation: str | Backend | None) -> Explanation:
    """What each implementation would do with the call.

    Raises:
        ValueError: `implementation` is not the name of one.
    """
    candidates, name = _candidates(implementation)
    refusals = {backend.name: backend.refusal(operands) for backend in candidates}
    able = [backend for backend in _in_order(candidates, name) if refusals[backend.name] is None]

    def verdict(backend: Backend) -> Verdict:
        refusal = refusals[backend.name]
        if refusal is not None:
            return Verdict(backend.name, False, f"cannot: {refusal}")
        runs = backend in able[:1]
        memory = "memory grows with S * (S + C)" if backend.quadratic else "memory grows with S"
        why = "asked for" if name is not None else "first choice"
        return Verdict(backend.name, runs, f"{why if runs else 'able'}; {memory}")

    return Explanation(tuple(verdict(backend) for backend in candidates))
