"""The attention layer: sliding, CSA and HCA in one class."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from foveal.backends.operands import Backend, Operands
from foveal.cache import AttentionCache, check_cache, counts_of
from foveal.checks import as_bool, as_choice, as_hidden_states, described
from foveal.config import AttentionConfig, as_config
from foveal.geometry import Documents, as_documents
from foveal.layers import LayerType, as_layer_type
from foveal.meshes import any_mesh
from foveal.nn.activations import Activations, Scored
from foveal.nn.grouped_linear import GroupedLinear
from foveal.nn.indexer import IndexedCompressor, compressor_of, index_queries
from foveal.nn.memory import Cached, Fresh, Memory
from foveal.nn.parameters import Numerics, as_rngs, linear, rms_norm, zeros_parameter
from foveal.ops.core_attention import attend
from foveal.ops.indexer_loss import IndexerLoss, indexer_loss
from foveal.ops.indexer_recall import IndexerRecall, indexer_recall
from foveal.ops.indexing import best_entries
from foveal.ops.output_projection import project_groups
from foveal.ops.rope import rotate
from foveal.typing import Array, DTypeLike, Float, Int, Precision, Size


class CompressedAttention(nnx.Module):
    """DeepSeek-V4's attention: the last tokens raw, everything older compressed (arXiv 2606.19348, section 2.3).

    The three layer types differ only in their compressor (none; overlapped, with an indexer; plain) and their RoPE
    table. Parameters do not depend on the sequence length; a row shorter than a window has no entries.

    A token whose projections are so large that their squares overflow float32 in a norm, from about 1e18 on, gives NaN
    and so does every token that sees it; transformers' norm gives zeros there. Smaller values come out right.

    Logical axes of the parameters: embed, q_lora, heads, kv, window, norm, index_heads, o_groups, group_heads, o_lora.

    Args:
        config: sizes, ratios, RoPE.
        layer_index: index of this layer in `config.layer_types`.
        layer_type: the type itself, in place of `layer_index`: a `LayerType`, or "sliding", "csa" or "hca".
        dtype: of activations and matmul operands. Norms, RoPE, pooling, softmax and sums are float32 or wider.
        param_dtype: of the kernels. Sinks, position biases and norm scales are always float32.
        precision: of the matmuls, as in `jax.lax.dot_general`.
        rngs: Flax random streams, of which `params` is used.

    Raises:
        ValueError: not exactly one of `layer_index` and `layer_type`, or one that the config does not have; a dtype
            other than bfloat16, float16, float32 and, with `jax_enable_x64`, float64; an argument of the wrong kind.
    """

    def __init__(
        self,
        config: AttentionConfig,
        layer_index: int | None = None,
        *,
        layer_type: LayerType | str | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: Precision = None,
        rngs: nnx.Rngs,
    ) -> None:
        config, rngs = as_config(config), as_rngs(rngs)
        self.config = config
        self.layer_type = _layer_type(config, layer_index, layer_type)
        self.spec = config.layer(self.layer_type)
        numerics = Numerics(dtype, param_dtype, precision, config.initializer_range)
        self.dtype, self.accumulation_dtype, self.precision = numerics.dtype, numerics.wide, precision
        eps, heads, dim = config.rms_norm_eps, config.num_attention_heads, config.head_dim

        self.q_a_proj = linear(
            config.hidden_size, config.q_lora_rank, ("embed", "q_lora"), numerics=numerics, rngs=rngs
        )
        self.q_a_norm = rms_norm(config.q_lora_rank, epsilon=eps, numerics=numerics, rngs=rngs)
        self.q_b_proj = linear(config.q_lora_rank, heads * dim, ("q_lora", "heads"), numerics=numerics, rngs=rngs)
        self.q_b_norm = rms_norm(dim, epsilon=eps, numerics=numerics, rngs=rngs, use_scale=False)
        self.kv_proj = linear(config.hidden_size, dim, ("embed", "kv"), numerics=numerics, rngs=rngs)
        self.kv_norm = rms_norm(dim, epsilon=eps, numerics=numerics, rngs=rngs)
        self.sinks = zeros_parameter((heads,), "heads")
        self.compressor = compressor_of(config, self.spec, numerics, rngs)
        self.o_a_proj = GroupedLinear(
            heads // config.o_groups * dim, config.o_lora_rank, config.o_groups, numerics=numerics, rngs=rngs
        )
        self.o_b_proj = linear(
            config.o_groups * config.o_lora_rank,
            config.hidden_size,
            ("o_groups", "embed"),
            numerics=numerics,
            rngs=rngs,
        )

    @overload
    def __call__(
        self,
        x: Float[Array, "B S E"],
        segment_ids: Int[Array, "B S"] | np.ndarray | Sequence[Sequence[int]] | None = None,
        *,
        documents: Documents | None = None,
        select: Literal["top_k", "all"] = "top_k",
        return_indexer_loss: Literal[False] = False,
        implementation: str | Backend | None = None,
    ) -> Float[Array, "B S E"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "B S E"],
        segment_ids: Int[Array, "B S"] | np.ndarray | Sequence[Sequence[int]] | None = None,
        *,
        documents: Documents | None = None,
        select: Literal["top_k", "all"] = "top_k",
        return_indexer_loss: Literal[True],
        implementation: str | Backend | None = None,
    ) -> tuple[Float[Array, "B S E"], IndexerLoss]: ...

    @any_mesh(like="x")
    def __call__(
        self,
        x: Float[Array, "B S E"],
        segment_ids: Int[Array, "B S"] | np.ndarray | Sequence[Sequence[int]] | None = None,
        *,
        documents: Documents | None = None,
        select: Literal["top_k", "all"] = "top_k",
        return_indexer_loss: bool = False,
        implementation: str | Backend | None = None,
    ) -> Float[Array, "B S E"] | tuple[Float[Array, "B S E"], IndexerLoss]:
        """Self-attention over whole rows of hidden states.

        Args:
            x: hidden states, [B, S, E].
            segment_ids: integers [B, S], for packed rows: a document is a maximal run of one nonzero id, 0 is
                padding. Each document gives what it would give alone; padding rows give zeros, whatever they hold.
            documents: the same, prepared once for all layers (`Documents`); not together with `segment_ids`.
                Without either, each row is one document.
            select: "top_k" lets a CSA layer attend to the entries its indexer picks, "all" to every visible one (the
                indexer's warm-up). No effect on other layer types.
            return_indexer_loss: also return the loss of a CSA layer's indexer, over the entries that `select` names.
                The indexer's parameters get gradients from this loss only, and no others get any from it. Zero in
                other layers, so that a model's losses can be summed.
            implementation: of core attention; see `foveal.core_attention`.

        Returns:
            [B, S, E] in the layer's dtype. With `return_indexer_loss` also an `IndexerLoss`.

        Raises:
            ValueError: x, segment_ids or documents that do not fit, or an unknown `select` or `implementation`.
            NotImplementedError: the implementation cannot do this.
        """
        as_hidden_states(x, self.config.hidden_size)
        as_choice("select", select, ("top_k", "all"))
        as_bool("return_indexer_loss", return_indexer_loss)
        memory = Fresh(self.config, self.spec, self._documents(x, segment_ids, documents))
        index = select == "top_k" or return_indexer_loss
        result, lse, made = self._attend(x, memory, implementation, select=select, index=index)
        if not return_indexer_loss:
            return result
        if made.scored is None:
            return result, IndexerLoss(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        return result, indexer_loss(
            *made.scored,
            q=made.q,
            entries=made.entries,
            lse=lse,
            sinks=self.sinks[...],
            visibility=made.visibility,
            indices=made.indices,
            precision=self.precision,
        )

    @any_mesh()
    def indexer_recall(
        self,
        x: Float[Array, "B S E"],
        segment_ids: Int[Array, "B S"] | np.ndarray | Sequence[Sequence[int]] | None = None,
        *,
        documents: Documents | None = None,
        implementation: str | Backend | None = None,
    ) -> IndexerRecall:
        """Recall of the indexer: the share of the K highest-weight entries that it selects.

        The weights are those of attention to all visible entries. To be measured now and then during training: it
        takes as long as several forward passes.

        Args:
            x: hidden states, [B, S, E].
            segment_ids: as in `__call__`.
            documents: as in `__call__`.
            implementation: of core attention.

        Returns:
            Sums over queries; both are zero in other layers, so that a model's sums can be added.

        Raises:
            ValueError: as `__call__`.
            NotImplementedError: the implementation cannot do this.
        """
        as_hidden_states(x, self.config.hidden_size)
        memory = Fresh(self.config, self.spec, self._documents(x, segment_ids, documents))
        made = self.activations(x, memory)
        if made.indices is None:
            return IndexerRecall(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        _, lse = self._core(made._replace(indices=None), implementation)
        return indexer_recall(
            made.indices,
            q=made.q,
            entries=made.entries,
            lse=lse,
            sinks=self.sinks[...],
            visibility=made.visibility,
            precision=self.precision,
        )

    def init_cache(self, batch: Size, capacity: int, *, max_rollback: int = 0) -> AttentionCache:
        """Create an empty cache for this layer's `prefill` and `decode`.

        Args:
            batch: B; may be a symbolic dimension of `jax.export`.
            capacity: maximum number of tokens per row, prompt included.
            max_rollback: number of tokens that `AttentionCache.rollback` must be able to take back at once.

        Raises:
            ValueError: a number below 0.
        """
        return AttentionCache.init(
            self.config,
            self.layer_type,
            batch=batch,
            capacity=capacity,
            max_rollback=max_rollback,
            dtype=self.dtype,
        )

    @any_mesh(like="x", keep="cache")
    def prefill(
        self,
        cache: AttentionCache,
        x: Float[Array, "B T E"],
        lengths: Int[Array, " B"] | np.ndarray | Sequence[int] | None = None,
        *,
        implementation: str | Backend | None = None,
    ) -> tuple[Float[Array, "B T E"], AttentionCache]:
        """Attend from the next tokens of every row to themselves and to everything in the cache.

        A prompt may come in any number of chunks of any length, with tokens decoded in between: the outputs are those
        of one call on the whole row. For packed prompts see `unpack`, for left-padded ones `left_aligned`.

        Args:
            cache: the tokens before these; not modified, but it may be donated.
            x: hidden states, [B, T, E], right-padded.
            lengths: integers [B] in an array or a sequence: how many of the T tokens each row has, 0 for none; all T by
                default.
            implementation: of core attention; see `foveal.core_attention`.

        Returns:
            [B, T, E] in the layer's dtype, zero on padding, and the cache with these tokens. Where `lengths` or the
            cache is traced, tokens beyond the cache's capacity count as padding.

        Raises:
            ValueError: arguments that do not fit each other or the layer; where they are concrete, lengths that are
                negative, above T, or more than the cache has room for.
            NotImplementedError: the implementation cannot do this.
        """
        return self._append(cache, x, lengths, implementation)

    @any_mesh(like="x", keep="cache")
    def decode(
        self,
        cache: AttentionCache,
        x: Float[Array, "B T E"],
        lengths: Int[Array, " B"] | np.ndarray | Sequence[int] | None = None,
        *,
        implementation: str | Backend | None = None,
    ) -> tuple[Float[Array, "B T E"], AttentionCache]:
        """Attend from one or a few new tokens per row to themselves and to everything in the cache.

        The same as `prefill` with T = 1, or with a few drafted tokens, causal among themselves; a row whose length is 0
        sits out. One token costs a pass over the window, plus all entries in an HCA layer, or the index keys and the
        selected entries in a CSA layer. Under `jax.jit` this compiles once for a whole generation, and works in place
        if the cache is donated. Arguments, results and errors are those of `prefill`.
        """
        return self._append(cache, x, lengths, implementation)

    def activations(
        self, x: Float[Array, "B S E"], memory: Memory, *, select: str = "top_k", index: bool = True
    ) -> Activations:
        """Inputs of core attention and, with `index`, of a CSA layer's index scores."""
        x = x.astype(self.dtype)
        if memory.padding is not None:  # what padding holds, NaN included, must not reach a weight's gradient
            x = jnp.where(memory.padding[:, :, None], 0.0, x)
        config, table = self.config, memory.table
        q_residual = checkpoint_name(self.q_a_norm(self.q_a_proj(x)).astype(self.dtype), "q_residual")
        q = self.q_b_proj(q_residual).reshape(*x.shape[:2], config.num_attention_heads, config.head_dim)
        q, kv = self.q_b_norm(q).astype(self.dtype), self.kv_norm(self.kv_proj(x)).astype(self.dtype)
        q, kv = checkpoint_name(rotate(q, table), "q"), checkpoint_name(rotate(kv, table), "kv")

        keys, entries, indices, scored = memory.raw_keys(kv), kv[:, :0], None, None
        if self.compressor is not None:
            entries = checkpoint_name(memory.entries(self.compressor, x), "entries")
            if isinstance(self.compressor, IndexedCompressor) and index:
                # The indexer learns from its own loss only, and nothing else learns from that loss.
                indexer, (x_in, q_in) = self.compressor.indexer, jax.lax.stop_gradient((x, q_residual))
                index_keys = checkpoint_name(memory.index_keys(indexer, x_in), "index_keys")
                scored = Scored(*index_queries(indexer, x_in, q_in, table), index_keys)
                if select == "top_k":
                    own = functools.partial(
                        best_entries, *scored, memory.visibility, indexer.top_k, precision=self.precision
                    )
                    indices = checkpoint_name(memory.selection(own), "indices")
        return Activations(q, keys, entries, scored, indices, memory.visibility, table)

    def _attend(
        self,
        x: Array,
        memory: Memory,
        implementation: str | Backend | None,
        *,
        select: str = "top_k",
        index: bool = True,
    ) -> tuple[Array, Array, Activations]:
        """The layer's one wiring: output [B, S, E], log-sum-exp [B, S, H], finite on padding, and the activations."""
        made = self.activations(x, memory, select=select, index=index)
        attended, lse = self._core(made, implementation)
        rotated = checkpoint_name(rotate(attended, made.table, inverse=True), "attention")
        grouped = project_groups(rotated, self.o_a_proj.kernel[...], self.precision)
        return self.o_b_proj(grouped), lse, made

    def _core(self, made: Activations, implementation: str | Backend | None) -> tuple[Array, Array]:
        """Core attention: output [B, S, H, D], still rotated, and log-sum-exp [B, S, H], finite on padding."""
        operands = Operands(
            made.q,
            made.kv,
            made.entries,
            self.sinks[...].astype(self.accumulation_dtype),
            made.visibility,
            made.indices if made.entries.shape[1] else None,
            None,
            self.config.head_dim**-0.5,
            self.precision,
        )
        return attend(operands, implementation)

    def _append(
        self, cache: AttentionCache, x: Array, lengths: Any, implementation: str | Backend | None
    ) -> tuple[Array, AttentionCache]:
        """See `prefill`."""
        as_hidden_states(x, self.config.hidden_size)
        check_cache(cache, self.config, self.spec, x.shape[0], self.dtype)
        memory = Cached(self.config, self.spec, cache, counts_of(cache, x, lengths), x.shape[1])
        out, _, _ = self._attend(x, memory, implementation)
        return out, memory.after()

    def _documents(self, x: Array, segment_ids: Any, documents: Documents | None) -> Documents:
        """Check the arguments and return the documents of the rows of x."""
        if segment_ids is not None:
            if documents is not None:
                raise ValueError("documents: expected not both segment_ids and documents, got both")
            documents = Documents.from_segment_ids(segment_ids)
            if documents.shape != x.shape[:2]:
                raise ValueError(f"segment_ids: expected [B, S] = {x.shape[:2]}, got shape {documents.shape}")
            return documents
        if documents is None:
            return Documents.whole(x.shape[0], x.shape[1])
        documents = as_documents("documents", documents)
        if documents.continues:
            raise ValueError("documents: expected documents without first_row, got a slice of a longer row")
        if documents.shape != x.shape[:2]:
            raise ValueError(f"documents: expected [B, S] = {x.shape[:2]}, got {documents.shape}")
        return documents


def _layer_type(config: AttentionConfig, layer_index: int | None, layer_type: LayerType | str | None) -> LayerType:
    if (layer_index is None) == (layer_type is None):
        got = f"{described(layer_index)} and {described(layer_type)}"
        raise ValueError(f"layer_index, layer_type: expected exactly one of them, got {got}")
    if layer_index is not None:
        return config.layer_type(layer_index)
    return as_layer_type("layer_type", layer_type)
