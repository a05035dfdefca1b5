"""Choosing an implementation: never another than the one named, and every refusal with its reason."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal.backends import registry
from foveal.backends.operands import Backend, Operands
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, explain

B, S, H, D, W, M, K = 1, 6, 2, 4, 3, 2, 2
VISIBILITY = Visibility(Documents.unpacked(B, S), W, M)
SHAPES = {"q": (B, S, H, D), "kv": (B, S, D), "entries": (B, S // M, D), "indices": (B, S, K), "sinks": (H,)}
ARRAYS: dict[str, Any] = {
    name: jnp.zeros(shape, "int32" if name == "indices" else "float32") for name, shape in SHAPES.items()
}


class Fake(Backend):
    """Answers with a number that names it, or refuses."""

    def __init__(self, name: str, value: float, *, quadratic: bool = False, reason: str | None = None):
        self.name, self.value, self.quadratic, self.reason = name, value, quadratic, reason
        self.requests: list[Operands] = []

    def refusal(self, operands: Operands) -> str | None:
        return self.reason

    def __call__(self, operands: Operands):
        assert self.reason is None, "called although it refuses"
        self.requests.append(operands)
        return jnp.full(SHAPES["q"], float(self.value)), jnp.zeros((B, S, H))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def put(*backends: Backend) -> None:
        monkeypatch.setattr(registry, "_PREFERENCE", backends)

    return put


def who_ran(**options) -> float:
    """Without indices, which would be sorted by a program of each call's own."""
    arrays = {name: array for name, array in ARRAYS.items() if name != "indices"}
    return float(np.asarray(core_attention(**arrays, visibility=VISIBILITY, **options))[0, 0, 0, 0])


# ------------------------------------------------------------------------------------------------------------- choice


def test_a_named_implementation_runs(install):
    install(Fake("one", 1), Fake("two", 2), Fake("three", 3, quadratic=True))
    assert [who_ran(implementation=name) for name in registry.names()] == [1, 2, 3]


def test_a_named_implementation_that_cannot_never_gives_way(install):
    install(Fake("able", 1), Fake("picky", 2, reason="no documents of 6 rows"))
    assert who_ran() == 1
    for run in (core_attention, jax.jit(core_attention, static_argnames="implementation")):
        with pytest.raises(NotImplementedError, match="'picky' cannot do this") as refused:
            run(**ARRAYS, visibility=VISIBILITY, implementation="picky")
        assert "no documents of 6 rows" in str(refused.value)


def test_none_takes_the_first_that_can(install):
    install(Fake("refuses", 1, reason="it is Monday"), Fake("second", 2), Fake("third", 3))
    assert who_ran() == 2


def test_none_takes_a_quadratic_one_only_where_nothing_else_can(install):
    install(Fake("quadratic", 1, quadratic=True), Fake("linear", 2))
    assert who_ran() == 2
    install(Fake("quadratic", 1, quadratic=True), Fake("linear", 2, reason="not on a Monday"))
    assert who_ran() == 1


def test_where_none_can_every_reason_is_given(install):
    install(Fake("one", 1, reason="too early"), Fake("two", 2, reason="too late"))
    with pytest.raises(NotImplementedError, match="no implementation can do this") as refused:
        who_ran()
    for part in ("one", "too early", "two", "too late"):
        assert part in str(refused.value)


@pytest.mark.usefixtures("unchecked_annotations")
def test_an_unknown_name_is_told_all_known_ones(install):
    install(Fake("one", 1), Fake("two", 2, reason="refuses"))
    for name in ("three", "One", ""):
        for function in (core_attention, explain):
            with pytest.raises(ValueError, match=r"^implementation: expected None or one of one, two, got ") as error:
                function(**ARRAYS, visibility=VISIBILITY, implementation=name)
            assert repr(name) in str(error.value)


def test_a_backend_gets_every_argument(install):
    """A backend that never hears of the sinks or the scale drops them."""
    fake = Fake("fake", 1)
    install(fake)
    core_attention(**ARRAYS, visibility=VISIBILITY, scale=0.25, precision="highest")
    (request,) = fake.requests
    assert request.visibility is VISIBILITY
    assert request.scale == 0.25
    assert request.precision == "highest"
    for name in ("q", "kv", "entries", "sinks"):
        np.testing.assert_array_equal(getattr(request, name), ARRAYS[name])
    # Of the slots given, each that the query sees, once: no backend has to think of the others.
    seen = np.asarray(VISIBILITY.sees_slots(ARRAYS["indices"]))
    assert request.indices is not None
    for got, given, visible in zip(request.indices[0], ARRAYS["indices"][0], seen[0], strict=True):
        assert sorted(got[got >= 0].tolist()) == sorted(set(given[visible].tolist()))
    core_attention(ARRAYS["q"], ARRAYS["kv"], visibility=Visibility(VISIBILITY.documents, W))
    request = fake.requests[-1]
    assert request.scale == D**-0.5
    assert request.entries.shape[1] == 0
    assert request.indices is request.sinks is None


# ------------------------------------------------------------------------------------------------------------ explain


def test_explain_names_each_implementation_with_its_reason(install):
    install(
        Fake("quadratic", 1, quadratic=True),
        Fake("picky", 2, reason="rows must be a multiple of 128"),
        Fake("linear", 3),
    )
    told = explain(**ARRAYS, visibility=VISIBILITY)
    assert told.chosen == "linear"
    assert [(v.name, v.runs) for v in told.verdicts] == [("quadratic", False), ("picky", False), ("linear", True)]
    lines = str(told).splitlines()
    assert len(lines) == 3
    for line, name in zip(lines, ("quadratic", "picky", "linear"), strict=True):
        assert name in line
    assert "rows must be a multiple of 128" in lines[1]
    assert [line for line in lines if line.startswith("->")] == [lines[2]]
    assert "S * (S + C)" in lines[0]

    named = explain(**ARRAYS, visibility=VISIBILITY, implementation="quadratic")
    assert named.chosen == "quadratic"
    assert sum(v.runs for v in named.verdicts) == 1


def test_explain_says_that_nothing_would_run(install):
    install(Fake("able", 1), Fake("picky", 2, reason="no"))
    told = explain(**ARRAYS, visibility=VISIBILITY, implementation="picky")
    assert told.chosen is None
    assert not any(v.runs for v in told.verdicts)
    assert "->" not in str(told)


def test_explain_agrees_with_what_runs(install):
    """Over every mixture of what the backends can do."""
    for mask in range(16):
        reasons = [None if mask >> bit & 1 else "no" for bit in range(2)]
        backends = [Fake(f"b{i}", i, quadratic=bool(mask >> i + 2 & 1), reason=reasons[i]) for i in range(2)]
        install(*backends)
        for implementation in (None, "b0", "b1"):
            chosen = explain(**ARRAYS, visibility=VISIBILITY, implementation=implementation).chosen
            if chosen is None:
                with pytest.raises(NotImplementedError):
                    who_ran(implementation=implementation)
            else:
                assert who_ran(implementation=implementation) == int(chosen[1:])
                assert implementation in (None, chosen)


@pytest.mark.usefixtures("unchecked_annotations")  # shapes are no arrays to them
def test_explain_needs_shapes_alone_and_computes_nothing(install):
    fake = Fake("fake", 1)
    install(fake)
    shapes: dict[str, Any] = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in ARRAYS.items()}
    assert explain(**shapes, visibility=VISIBILITY).chosen == "fake"
    assert explain(**ARRAYS, visibility=VISIBILITY).chosen == "fake"
    assert not fake.requests
    with pytest.raises(ValueError, match=r"^kv: expected"):
        explain(**shapes | {"kv": shapes["q"]}, visibility=VISIBILITY)


def test_shipped_implementations():
    """Names are an interface; of those there are, at least one runs everywhere."""
    assert "dense" in registry.names()
    assert len(set(registry.names())) == len(registry.names())
    told = explain(**ARRAYS, visibility=VISIBILITY, implementation="dense")
    assert told.chosen == "dense"
    assert explain(**ARRAYS, visibility=VISIBILITY).chosen is not None
