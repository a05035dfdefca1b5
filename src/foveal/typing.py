"""Array types and the legend of dimension letters used in every annotation of this package.

====  =========================================================================
B     batch
S     rows of the sequence (tokens, padding included)
T     some of them: a tile of queries, or the tokens that a cache is given
N     raw keys: S, after the history of rows that continue a sequence
M     all keys: N raw ones, then C entries
P     rows of a ring in a decode cache
E     model width (`hidden_size`)
H     query heads
D     head dim
R     RoPE dims, the trailing ones of D: R / 2 pairs
C     entries, one slot each: S // m
m     compress ratio: tokens per window, so per entry
W     sliding window: raw keys a query sees, itself included
K     selected entries per query
I     indexer heads
J     indexer head dim
F     width of a compressor's projections: D, or 2 D where windows overlap
G     output groups
L     latent width: `q_lora_rank` for queries, `o_lora_rank` for outputs
====  =========================================================================

Other sizes are spelled out ("documents", "windows"). Annotations are jaxtyping's. They cost nothing at run time; the
test suite checks them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

Precision = str | jax.lax.Precision | None
"""What `precision=` takes, as in `jax.numpy.einsum`: "highest", `jax.lax.Precision.HIGHEST`, ... or JAX's default."""


Size = int | Any
"""The size of an axis: an int, or a symbolic dimension of `jax.export`."""


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """float64 for float64, else float32: what logits, softmax, norms and sums are computed in.

    Not `jnp.promote_types`, which refuses bfloat16 with float32 under strict dtype promotion.
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def lowest(dtype: DTypeLike) -> float:
    """The lowest finite number of a float dtype: a softmax's logit of what is not there, whose weight is exactly 0.

    Not -inf, at which a run under `jax_debug_infs` ends.
    """
    return float(jnp.finfo(dtype).min)


def narrowed(values: Int[Array, "..."] | np.ndarray, low: int, high: int) -> Int32[Array, "..."]:
    """Integers of any width as int32, those beyond [low, high] at its ends: saturated first, so that none wraps."""
    if isinstance(values, np.ndarray | np.generic):
        return jnp.asarray(np.clip(values, low, high).astype(np.int32))
    limits = jnp.iinfo(values.dtype)
    return jnp.clip(values, max(low, limits.min), min(high, limits.max)).astype(jnp.int32)


__all__ = [
    "Array",
    "Bool",
    "DTypeLike",
    "Float",
    "Float32",
    "Int",
    "Int32",
    "Precision",
    "Shaped",
    "Size",
    "accumulation_dtype",
    "lowest",
    "narrowed",
]
