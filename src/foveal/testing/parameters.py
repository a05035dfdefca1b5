"""Conversion of a layer's parameters to a flat dictionary, name to array, and back."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from foveal.typing import Array


def get_params(module: nnx.Module) -> dict[str, Array]:
    """The module's parameters by dotted path, such as "compressor.kv_proj.kernel"."""
    flat = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    return {".".join(map(str, path)): variable[...] for path, variable in flat.items()}


def set_params(module: nnx.Module, params: Mapping[str, object]) -> None:
    """Overwrite the module's parameters; each keeps its dtype.

    Raises:
        ValueError: names are missing or unexpected, or a shape differs.
    """
    flat = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    own = {".".join(map(str, path)): path for path in flat}
    if set(own) != set(params):
        missing, unexpected = sorted(set(own) - set(params)), sorted(set(params) - set(own))
        raise ValueError(f"params: expected the module's own names, got missing {missing}, unexpected {unexpected}")
    for name, path in own.items():
        value, old = jnp.asarray(params[name]), flat[path][...]
        if value.shape != old.shape:
            raise ValueError(f"params[{name!r}]: expected shape {old.shape}, got {value.shape}")
        flat[path] = flat[path].replace(value.astype(old.dtype))
    nnx.update(module, nnx.from_flat_state(flat))
