"""The lightning indexer, which selects the entries that each query of a CSA layer attends to."""

from __future__ import annotations

from flax import nnx

from foveal.checks import as_array
from foveal.config import AttentionConfig, as_config
from foveal.geometry import Visibility
from foveal.layers import LayerSpec, LayerType
from foveal.meshes import any_mesh
from foveal.nn.compressor import Compressor
from foveal.nn.parameters import Numerics, linear
from foveal.ops.indexing import select_entries
from foveal.ops.rope import RopeTable, apply_rope, rotate
from foveal.typing import Array, Float, Float32, Int32


class IndexerScorer(nnx.Module):
    """Weights of the indexer heads, per query."""

    def __init__(self, config: AttentionConfig, *, numerics: Numerics, rngs: nnx.Rngs) -> None:
        axes = ("embed", "index_heads")
        self.scaling = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.weights_proj = linear(
            config.hidden_size, config.index_n_heads, axes, numerics=numerics, rngs=rngs, wide_output=True
        )

    def __call__(self, x: Float[Array, "B S E"]) -> Float32[Array, "B S I"]:
        """Head weights of hidden states: [B, S, E] -> float32 [B, S, I], of either sign."""
        return self.weights_proj(x) * self.scaling


class LightningIndexer(Compressor):
    """Selector of the entries that small heads of its own score best (arXiv 2606.19348, equations 13-17).

    An overlapped compressor of width J, whose entries are the index keys, with queries added.

    Args:
        config: sizes.
        numerics: dtypes and precision.
        rngs: Flax random streams.

    Raises:
        ValueError: an argument of the wrong kind.
    """

    def __init__(self, config: AttentionConfig, *, numerics: Numerics, rngs: nnx.Rngs) -> None:
        config = as_config(config)
        layer = config.layer(LayerType.CSA)
        super().__init__(
            config.hidden_size,
            config.index_head_dim,
            ratio=layer.compress_ratio,
            overlap=layer.overlap,
            epsilon=config.rms_norm_eps,
            numerics=numerics,
            rngs=rngs,
        )
        self.heads, self.head_dim, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.precision = numerics.precision
        self.q_b_proj = linear(
            config.q_lora_rank, self.heads * self.head_dim, ("q_lora", "index_heads"), numerics=numerics, rngs=rngs
        )
        self.scorer = IndexerScorer(config, numerics=numerics, rngs=rngs)

    @any_mesh(like="x", dims=2)
    def queries(
        self, x: Float[Array, "B S E"], q_residual: Float[Array, "B S L"], table: RopeTable
    ) -> tuple[Float[Array, "B S I J"], Float32[Array, "B S I"]]:
        """Index queries and head weights.

        Args:
            x: hidden states, [B, S, E].
            q_residual: the normed query latent that the attention's own `q_b_proj` takes, [B, S, q_lora_rank].
            table: RoPE at the queries' positions.

        Returns:
            Queries [B, S, I, J] in the layer's dtype, and head weights, float32 [B, S, I].

        Raises:
            ValueError: arguments that do not fit each other or the layer.
        """
        x = as_array("x", x, "B S E", (None, None, self.kv_proj.in_features))
        q_residual = as_array("q_residual", q_residual, "B S L", (*x.shape[:2], self.q_b_proj.in_features))
        q = self.q_b_proj(q_residual).reshape(*x.shape[:2], self.heads, self.head_dim)
        return apply_rope(q, table), self.scorer(x)

    @any_mesh(like="q", dims=2)
    def select(
        self,
        q: Float[Array, "B S I J"],
        weights: Float32[Array, "B S I"],
        keys: Float[Array, "B C J"],
        visibility: Visibility,
    ) -> Int32[Array, "B S K"]:
        """Slots selected for each query: int32 [B, S, min(index_topk, C)], ascending, -1 for none; no gradient."""
        return select_entries(q, weights, keys, visibility=visibility, top_k=self.top_k, precision=self.precision)


def index_queries(indexer: LightningIndexer, x: Array, q_residual: Array, table: RopeTable) -> tuple[Array, Array]:
    """`LightningIndexer.queries` for checked arguments."""
    q, weights = indexer.q_b_proj(q_residual), indexer.scorer(x)
    return rotate(q.reshape(*x.shape[:2], indexer.heads, indexer.head_dim), table), weights


class IndexedCompressor(Compressor):
    """CSA's compressor, which owns the indexer, as in transformers' module tree."""

    indexer: LightningIndexer


def compressor_of(config: AttentionConfig, layer: LayerSpec, numerics: Numerics, rngs: nnx.Rngs) -> Compressor | None:
    """Build a layer's compressor: none, one with an indexer, or a plain one."""
    if not layer.has_entries:
        return None
    compressor = (IndexedCompressor if layer.has_indexer else Compressor)(
        config.hidden_size,
        config.head_dim,
        ratio=layer.compress_ratio,
        overlap=layer.overlap,
        epsilon=config.rms_norm_eps,
        numerics=numerics,
        rngs=rngs,
    )
    if isinstance(compressor, IndexedCompressor):
        compressor.indexer = LightningIndexer(config, numerics=numerics, rngs=rngs)
    return compressor
