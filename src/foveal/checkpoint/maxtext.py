"""Converting to and from MaxText's trees (0.2.5): other names, a separate heads axis, layers stacked by scan.

MaxText's DeepSeek-V4 has no YaRN, so its compressed layers give other results with the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from flax.core import meta

from foveal.checkpoint.files import CheckpointError
from foveal.checkpoint.layers import abstract_layer, parameter_shapes
from foveal.checkpoint.names import maxtext_path, maxtext_shape, rows_of
from foveal.checkpoint.save import common_config, parameters
from foveal.checks import FLOATS, as_dtype
from foveal.config import AttentionConfig, as_config
from foveal.nn.attention import CompressedAttention
from foveal.typing import Array, DTypeLike, Precision

UNSCANNED = 3
"""Number of layers before those that MaxText scans: its `first_num_hash_layers`."""

_PERIOD = 2  # HCA and CSA alternate
_SCAN_AXIS = 1  # MaxText's param_scan_axis
_DECODER = ("params", "decoder")


class _Place(NamedTuple):
    """The location of a layer's attention: the path of its tree and, if layers are stacked, its index among them."""

    path: tuple[str, ...]
    stacked: int | None


def to_maxtext(layers: Mapping[int, CompressedAttention], *, scan: bool = False) -> dict[str, Any]:
    """Convert layers to MaxText's parameters.

    Args:
        layers: the layers by index; with `scan`, all layers of the model.
        scan: stack the layers from the fourth on, as MaxText's `scan_layers` expects them: those at odd indices in
            `scanned_blocks.layers_0`, those at even indices in `scanned_blocks.layers_1`, along axis 1.

    Returns:
        {"params": {"decoder": {"layers_0": {"self_attention": {"wq_a": {"kernel": ...}, ...}}, ...}}}. Arrays keep
        their dtypes. Kernels are [in, out], except `wq_b` and `wkv`, [in, heads, head_dim], and `o_a_proj`, [groups,
        in, out]; stacked ones have the layer axis inserted at 1.

    Raises:
        ValueError: no layers, layers of different models; with `scan`, missing layers or types that do not alternate.
    """
    config = common_config(layers)
    flat: dict[tuple[str, ...], Array] = {}
    stacks: dict[tuple[str, ...], dict[int, Array]] = {}
    for index, place in _places(config, sorted(layers), scan).items():
        for row, value in parameters(layers[index]):
            path = (*place.path, *maxtext_path(row, layers[index].spec))
            reshaped = value.reshape(maxtext_shape(row, config, value.shape))
            if place.stacked is None:
                flat[path] = reshaped
            else:
                stacks.setdefault(path, {})[place.stacked] = reshaped
    for path, members in stacks.items():
        flat[path] = jnp.stack([members[i] for i in range(len(members))], axis=_SCAN_AXIS)
    return traverse_util.unflatten_dict(flat)


def from_maxtext(
    params: Mapping[str, Any],
    config: AttentionConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike | None = None,
    precision: Precision = None,
) -> dict[int, CompressedAttention]:
    """Convert MaxText's parameters to attention layers.

    Args:
        params: the tree of a MaxText checkpoint, scanned or not: {"params": {"decoder": ...}}, possibly nested in
            another "params". Parameters outside attention are ignored.
        config: the model's config.
        dtype: dtype of activations.
        param_dtype: dtype of the kernels; `dtype` by default.
        precision: precision of the matmuls.

    Returns:
        All layers of the config, by index.

    Raises:
        CheckpointError: a `ValueError` listing parameters that are missing, unexpected, of another shape or not floats.
        ValueError: `params` is not such a tree, or a dtype is not floating.
    """
    config = as_config(config)
    kind = as_dtype("dtype", dtype)
    param_kind = kind if param_dtype is None else as_dtype("param_dtype", param_dtype)
    made = {}
    for index, values in _collected(_decoder(params), config).items():
        graph, state = nnx.split(abstract_layer(config, index, kind, param_kind, precision))
        leaves = {
            path: leaf.replace(jnp.asarray(values[".".join(map(str, path))], leaf.dtype))
            for path, leaf in nnx.to_flat_state(state)
        }
        made[index] = nnx.merge(graph, nnx.from_flat_state(leaves))
    return made


def _collected(decoder: Mapping[str, Any], config: AttentionConfig) -> dict[int, dict[str, Any]]:
    """Collect the arrays of every layer by the modules' dotted paths, in the modules' shapes.

    Raises:
        CheckpointError: parameters are missing, unexpected or of another shape or dtype; it lists all problems.
    """
    flat = dict(_leaves(decoder, _DECODER))
    left = {path for path in flat if "self_attention" in path}
    problems: list[str] = []
    found: dict[int, dict[str, Any]] = {}
    places = _places(config, list(range(config.num_layers)), scan="scanned_blocks" in decoder)
    for index, place in places.items():
        shapes, spec = parameter_shapes(config, index), config.layer(index)
        found[index] = {}
        for row in rows_of(spec):
            path = (*place.path, *maxtext_path(row, spec))
            left.discard(path)
            value, problem = _taken(flat.get(path), place, places, maxtext_shape(row, config, shapes[row.path]))
            if problem is None:
                found[index][row.path] = value.reshape(shapes[row.path])
            else:
                problems.append(f"{'-'.join(path)}: {problem}")
    problems += [f"{'-'.join(path)}: unexpected" for path in sorted(left)]
    if problems:
        raise CheckpointError("MaxText's parameters", dict.fromkeys(problems))
    return found


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a tree with their paths, unboxed where Flax has boxed them."""
    if isinstance(tree, Mapping):
        for key, member in tree.items():
            yield from _leaves(member, (*path, str(key)))
    elif isinstance(tree, nnx.Variable):
        yield path, tree[...]
    else:
        yield path, meta.unbox(tree)


def _places(config: AttentionConfig, layers: list[int], scan: bool) -> dict[int, _Place]:
    if not scan:
        return {i: _Place((*_DECODER, f"layers_{i}", "self_attention"), None) for i in layers}
    if layers != list(range(config.num_layers)):
        raise ValueError(f"layers: expected all {config.num_layers} layers, to be scanned over, got {layers}")
    types = config.layer_types[UNSCANNED:]
    pair = types[:_PERIOD]
    if len(types) % _PERIOD or types != pair * (len(types) // _PERIOD):
        raise ValueError(
            f"layers: expected two alternating types from layer {UNSCANNED} on, to be scanned over, got "
            f"{[str(layer_type) for layer_type in types]}"
        )
    places = _places(config, layers[:UNSCANNED], scan=False)
    for i in layers[UNSCANNED:]:
        stacked, member = divmod(i - UNSCANNED, _PERIOD)
        places[i] = _Place((*_DECODER, "scanned_blocks", f"layers_{member}", "self_attention"), stacked)
    return places


def _taken(value: Any, place: _Place, places: dict[int, _Place], shape: tuple[int, ...]) -> tuple[Any, str | None]:
    """Return a layer's part of an array, or None and what is wrong with the array."""
    if value is None:
        return None, "missing"
    if not isinstance(value, jax.Array | np.ndarray):
        return None, f"expected an array of floats, got {type(value).__name__}"
    if value.dtype.name not in FLOATS:
        return None, f"expected an array of floats, got {value.dtype}"
    expected = shape
    if place.stacked is not None:
        count = sum(other.path == place.path for other in places.values())
        expected = (*shape[:_SCAN_AXIS], count, *shape[_SCAN_AXIS:])
    if tuple(value.shape) != expected:
        return None, f"expected shape {list(expected)}, got {list(value.shape)}"
    return (value if place.stacked is None else value.take(place.stacked, axis=_SCAN_AXIS)), None


def _decoder(params: Mapping[str, Any]) -> Mapping[str, Any]:
    tree: Any = params
    while isinstance(tree, Mapping) and "decoder" not in tree and isinstance(tree.get("params"), Mapping):
        tree = tree["params"]
    if not isinstance(tree, Mapping) or not isinstance(tree.get("decoder"), Mapping):
        keys = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(f'params: expected a tree with ["params"]["decoder"], got {keys}')
    return tree["decoder"]
