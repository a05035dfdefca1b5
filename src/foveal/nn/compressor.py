"""The compressor, which turns windows of tokens into entries."""

from __future__ import annotations

from flax import nnx

from foveal.checks import as_array, as_bool, as_float, as_int
from foveal.geometry import WindowLayout
from foveal.meshes import any_mesh
from foveal.nn.parameters import Numerics, as_numerics, as_rngs, linear, rms_norm, zeros_parameter
from foveal.ops import pooling
from foveal.ops.pooling import pool_windows
from foveal.ops.rope import RopeTable, apply_rope, rotate
from foveal.typing import Array, Float


class Compressor(nnx.Module):
    """Pooling of each complete window of m tokens into one entry, normed and rotated to the window's position.

    One class for HCA (plain windows) and for CSA and its indexer (overlapped windows, projections twice as wide).
    Technical report, arXiv 2606.19348, equations 9-12 and 20-23. Projections come out in float32 (float64 in a float64
    layer); gate, softmax and weighted sum are always float32.

    Args:
        hidden_size: E.
        head_dim: D, the width of an entry.
        ratio: m.
        overlap: whether each window's entry also draws on the window before it.
        epsilon: of the norm.
        numerics: dtypes and precision.
        rngs: Flax random streams.

    Raises:
        ValueError: an argument of the wrong kind.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        *,
        ratio: int,
        overlap: bool,
        epsilon: float,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ) -> None:
        hidden_size, head_dim = as_int("hidden_size", hidden_size, 1), as_int("head_dim", head_dim, 1)
        ratio, overlap = as_int("ratio", ratio, 1), as_bool("overlap", overlap)
        epsilon = as_float("epsilon", epsilon, "> 0", 0.0)
        numerics, rngs = as_numerics(numerics), as_rngs(rngs)
        width = 2 * head_dim if overlap else head_dim
        self.overlap = overlap
        self.dtype = numerics.dtype
        self.kv_proj = linear(hidden_size, width, ("embed", "kv"), numerics=numerics, rngs=rngs, wide_output=True)
        self.gate_proj = linear(hidden_size, width, ("embed", "kv"), numerics=numerics, rngs=rngs, wide_output=True)
        self.position_bias = zeros_parameter((ratio, width), "window", "kv")
        self.kv_norm = rms_norm(head_dim, epsilon=epsilon, numerics=numerics, rngs=rngs)

    @any_mesh(like="x", dims=1)
    def __call__(self, x: Float[Array, "B S E"], layout: WindowLayout, table: RopeTable) -> Float[Array, "B C D"]:
        """Entries of hidden states.

        Args:
            x: [B, S, E].
            layout: which rows form which entry.
            table: RoPE at `layout.positions`.

        Returns:
            [B, C, D] in the layer's dtype; zeros in slots that hold no window.
        """
        return self.pool(*self.project(x), layout, table)

    @any_mesh(like="x", dims=2)
    def project(self, x: Float[Array, "B S E"]) -> tuple[Float[Array, "B S F"], Float[Array, "B S F"]]:
        """Values and gates that each token contributes to its windows, complete or not; [B, S, F] each.

        Float32, or float64 in a float64 layer. F is D, or 2 D where windows overlap.

        Raises:
            ValueError: x is not floats [B, S, E].
        """
        return project(self, as_array("x", x, "B S E", (None, None, self.kv_proj.in_features)))

    @any_mesh(like="kv", dims=1)
    def pool(
        self, kv: Float[Array, "B S F"], gate: Float[Array, "B S F"], layout: WindowLayout, table: RopeTable
    ) -> Float[Array, "B C D"]:
        """Entries of projected tokens: see `__call__` and `project`."""
        pooled = pool_windows(kv, gate, self.position_bias[...], layout, overlap=self.overlap)
        return apply_rope(self.kv_norm(pooled.astype(self.dtype)).astype(self.dtype), table)


def project(compressor: Compressor, x: Array) -> tuple[Array, Array]:
    """`Compressor.project` for checked arguments, as a layer runs it."""
    return compressor.kv_proj(x), compressor.gate_proj(x)


def pool(compressor: Compressor, kv: Array, gate: Array, layout: WindowLayout, table: RopeTable) -> Array:
    """`Compressor.pool` for checked arguments, as a layer runs it."""
    pooled = pooling.pool(kv, gate, compressor.position_bias[...], layout, overlap=compressor.overlap)
    return rotate(compressor.kv_norm(pooled.astype(compressor.dtype)).astype(compressor.dtype), table)
