"""Meshes with Explicit axes, arrays on them, and what a layer's or a function's results are held against."""

import functools

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

MESHES = {"Explicit": ("Explicit", "Explicit"), "mixed": ("Explicit", "Auto")}
B, S, H, D, RATIO = 2, 24, 4, 8, 4


@functools.cache
def mesh_of(kind: str) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=tuple(AxisType[name] for name in MESHES[kind]))


def explicit_spec(array: jax.Array) -> P:
    """The sharding in the array's type: one entry a dim."""
    return P(*(*jax.typeof(array).sharding.spec, *[None] * array.ndim)[: array.ndim])


def operands() -> tuple[dict[str, np.ndarray], dict[str, P]]:
    """Arrays for every public function, and how each lies on the mesh: batch over "data", heads over "tensor"."""
    rng = np.random.default_rng(0)
    floats = {
        "q": ((B, S, H, D), P("data", None, "tensor")),
        "kv": ((B, S, D), P("data")),
        "entries": ((B, S // RATIO, D), P("data")),
        "sinks": ((H,), P("tensor")),
        "index_q": ((B, S, H, D), P("data", None, "tensor")),
        "index_weights": ((B, S, H), P("data", None, "tensor")),
        "index_keys": ((B, S // RATIO, D), P("data")),
        "values": ((B, S, 2 * D), P("data", None, "tensor")),
        "bias": ((RATIO, 2 * D), P(None, "tensor")),
        "groups": ((2, H // 2 * D, 6), P("tensor")),
        "packed": ((S, D), P()),
    }
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, (shape, _) in floats.items()}
    specs = {name: spec for name, (_, spec) in floats.items()}
    integers = {
        "ids": np.array([[1] * 7 + [2] * 14 + [0] * 3, [1] * 24]),
        "ends": np.array([[0, 7, 21, 21], [0, 4, 8, 24]]),
        "lengths": np.array([24, 5]),
        "indices": rng.integers(-1, S // RATIO, size=(B, S, 3)),
    }
    arrays |= {name: values.astype(np.int32) for name, values in integers.items()}
    arrays["packed_ends"] = arrays["ends"][0]
    return arrays, specs | dict.fromkeys(integers, P("data")) | {"packed_ends": P()}


def assert_same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))
