"""A wrong call of core attention is refused by the name of the argument, before any backend hears of it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from foveal.backends import registry
from foveal.backends.operands import Backend, Operands
from foveal.geometry import Documents, Visibility
from foveal.ops import core_attention, explain

B, S, H, D, W, M, K = 2, 17, 3, 6, 4, 3, 4
C = S // M
VISIBILITY = Visibility(Documents.unpacked(B, S), W, M)
CALL = {"q": (B, S, H, D), "kv": (B, S, D), "entries": (B, C, D), "indices": (B, S, K), "sinks": (H,)}
INTEGERS = {"indices"}
BAD_SHAPES = [
    ("q", {"q": (B, S, D)}),
    ("q", {"q": (B, S + 1, H, D)}),
    ("q", {"q": (1, S, H, D), "kv": (1, S, D), "entries": (1, C, D), "indices": None}),
    ("kv", {"kv": (B, S, 1, D)}),
    ("kv", {"kv": (B, S, H, D)}),
    ("kv", {"kv": (B, S, D + 1)}),
    ("kv", {"kv": (1, S, D)}),
    ("kv", {"kv": (B, S - 1, D)}),
    ("entries", {"entries": (B, C + 1, D)}),
    ("entries", {"entries": (1, C, D)}),
    ("entries", {"entries": (B, C, D - 1)}),
    ("entries", {"entries": (B, C)}),
    ("entries", {"entries": None}),
    ("entries", {"entries": None, "indices": None}),
    ("indices", {"indices": (B, S)}),
    ("indices", {"indices": (B, 1, K)}),
    ("indices", {"indices": (1, S, K)}),
    ("indices", {"indices": (B, S, H, K)}),
    ("sinks", {"sinks": (H + 1,)}),
    ("sinks", {"sinks": (1, H)}),
    ("sinks", {"sinks": ()}),
]
BAD_DTYPES = [
    ("q", {"q": jnp.int32}),
    ("kv", {"kv": jnp.bfloat16}),
    ("kv", {"q": jnp.bfloat16, "entries": jnp.bfloat16}),
    ("entries", {"entries": jnp.bfloat16}),
    ("entries", {"entries": jnp.int32}),
    ("indices", {"indices": jnp.float32}),
    ("indices", {"indices": jnp.bool_}),
    ("sinks", {"sinks": jnp.int32}),
]


class Tripwire(Backend):
    """No backend may be reached by a call that is wrong."""

    name, quadratic = "tripwire", False

    def refusal(self, operands: Operands) -> str | None:
        raise AssertionError("a wrong call reached the choice of a backend")

    def __call__(self, operands: Operands):
        raise AssertionError("a wrong call reached a backend")


@pytest.fixture
def as_users_call(monkeypatch: pytest.MonkeyPatch, unchecked_annotations: None) -> None:
    """Without the test suite's type checker, which would speak first; and with a backend that must not be reached."""
    monkeypatch.setattr(registry, "_PREFERENCE", (Tripwire(),))


def call(*, jitted: bool, function=core_attention, visibility=VISIBILITY, shapes=(), dtypes=(), **options):
    shapes, dtypes = CALL | dict(shapes), dict(dtypes)
    arrays = {
        name: None if shape is None else jnp.zeros(shape, dtypes.get(name, "int32" if name in INTEGERS else "float32"))
        for name, shape in shapes.items()
    }
    run = functools.partial(function, visibility=visibility, **options)
    return (jax.jit(run) if jitted else run)(**arrays)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {"shapes": shapes}) for name, shapes in BAD_SHAPES),
        *((name, {"dtypes": dtypes}) for name, dtypes in BAD_DTYPES),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(as_users_call, name, changed, jitted):
    with pytest.raises(ValueError, match=f"^{name}: expected .*got "):
        call(jitted=jitted, **changed)


@pytest.mark.parametrize("jitted", [False, True])
def test_entries_for_a_layer_without_are_refused(as_users_call, jitted):
    with pytest.raises(ValueError, match=r"^entries: expected .*got float32 of shape"):
        call(visibility=Visibility(VISIBILITY.documents, W, 0), jitted=jitted)


@pytest.mark.parametrize("function", [core_attention, explain])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.5", 1j, True, jnp.ones(())])
def test_a_scale_that_is_no_finite_number_is_refused(as_users_call, scale, function):
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, got "):
        call(scale=scale, jitted=False, function=function)


@pytest.mark.parametrize(("function", "jitted"), [(core_attention, False), (core_attention, True), (explain, False)])
def test_an_unknown_implementation_is_told_the_known_ones(unchecked_annotations, function, jitted):
    with pytest.raises(ValueError, match=r"^implementation: expected .*dense.*got 'splish'"):
        call(implementation="splish", function=function, jitted=jitted)
