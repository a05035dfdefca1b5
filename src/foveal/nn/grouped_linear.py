"""The block-diagonal half of the output projection, as a module."""

from __future__ import annotations

import jax
from flax import nnx

from foveal.checks import as_array, as_int
from foveal.meshes import any_mesh
from foveal.nn.parameters import Numerics, as_numerics, as_rngs, logical_axes
from foveal.ops.output_projection import grouped_projection
from foveal.typing import Array, Float


class GroupedLinear(nnx.Module):
    """Projection of each of G groups of heads to L features by its own matrix; kernel [G, (H / G) D, L].

    Args:
        in_features: (H / G) D, the width of one group.
        out_features: L, per group.
        groups: G.
        numerics: dtypes and precision.
        rngs: Flax random streams.

    Raises:
        ValueError: an argument of the wrong kind.
    """

    def __init__(self, in_features: int, out_features: int, groups: int, *, numerics: Numerics, rngs: nnx.Rngs) -> None:
        numerics, rngs = as_numerics(numerics), as_rngs(rngs)
        init = jax.nn.initializers.normal(numerics.init_std)
        sizes = {"groups": groups, "in_features": in_features, "out_features": out_features}
        shape = tuple(as_int(name, size, 1) for name, size in sizes.items())
        self.kernel = nnx.Param(
            init(rngs.params(), shape, numerics.param_dtype), **logical_axes("o_groups", "group_heads", "o_lora")
        )
        self.dtype, self.precision = numerics.dtype, numerics.precision

    @any_mesh(like="x", dims=3)
    def __call__(self, x: Float[Array, "B S H D"]) -> Float[Array, "B S latents"]:
        """Project each group: [B, S, H, D] -> [B, S, G * L]."""
        x = as_array("x", x, "B S H D")
        return grouped_projection(x.astype(self.dtype), self.kernel[...], precision=self.precision)
