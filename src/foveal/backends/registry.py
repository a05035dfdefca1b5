"""Choice of the implementation that runs a call, made here only."""

from __future__ import annotations

import dataclasses

from foveal.backends.chunked import Chunked
from foveal.backends.dense import Dense
from foveal.backends.operands import Backend, Operands
from foveal.backends.splash import Splash, SplashDynamic
from foveal.backends.tpu import Fused
from foveal.checks import described

_PREFERENCE: tuple[Backend, ...] = (Splash(), Chunked(), SplashDynamic(), Dense(), Fused())
"""Order in which `implementation=None` tries them. Those after `chunked`, which can run any call, run only if named."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One implementation's answer to a call.

    Attributes:
        name: name that `implementation=` takes.
        runs: whether this is the one that would run.
        reason: why it would, could or cannot run the call.
    """

    name: str
    runs: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Printable report: which implementation would run a call, and why the others would not."""

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        """Name of the implementation that would run; None if the call would be refused."""
        return next((v.name for v in self.verdicts if v.runs), None)

    def __str__(self) -> str:
        """One line per implementation, the chosen one marked."""
        width = max(len(v.name) for v in self.verdicts)
        return "\n".join(f"{'->' if v.runs else '  '} {v.name:<{width}}  {v.reason}" for v in self.verdicts)


def names() -> tuple[str, ...]:
    """Names of all implementations."""
    return tuple(backend.name for backend in _PREFERENCE)


def named(name: str) -> Backend:
    """Return the implementation of that name.

    Raises:
        ValueError: there is none.
    """
    candidates, _ = _candidates(name)
    return next(backend for backend in candidates if backend.name == name)


def _candidates(implementation: str | Backend | None) -> tuple[tuple[Backend, ...], str | None]:
    """All implementations, a configured one in place of its namesake, and the name that was asked for."""
    if isinstance(implementation, Backend):
        name = implementation.name
        return tuple(implementation if backend.name == name else backend for backend in _PREFERENCE), name
    if implementation is not None and not (isinstance(implementation, str) and implementation in names()):
        known = ", ".join(names())
        raise ValueError(f"implementation: expected None or one of {known}, got {described(implementation)}")
    return _PREFERENCE, implementation


def _in_order(candidates: tuple[Backend, ...], name: str | None) -> list[Backend]:
    """Candidates that may run, the best first. Unless named, quadratic ones come after all linear ones."""
    if name is not None:
        return [backend for backend in candidates if backend.name == name]
    return sorted(candidates, key=lambda backend: backend.quadratic)


def choose(operands: Operands, implementation: str | Backend | None) -> Backend:
    """Choose the implementation that runs the call. A named one is never replaced by another.

    Raises:
        ValueError: `implementation` is not a known name.
        NotImplementedError: the named one, or every one, cannot run the call; the message says why.
    """
    candidates, name = _candidates(implementation)
    for backend in _in_order(candidates, name):
        if backend.refusal(operands) is None:
            return backend
    what = "no implementation can do this" if name is None else f"{name!r} cannot do this"
    raise NotImplementedError(f"{what}:\n{explain(operands, implementation)}")


def explain(operands: Operands, implementation: str | Backend | None) -> Explanation:
    """Explain what each implementation would do with the call.

    Raises:
        ValueError: `implementation` is not a known name.
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
