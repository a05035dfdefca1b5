"""Array types and the legend of dimension letters used in every annotation of this package.

====  =========================================================================
B     batch
S     rows of the sequence (tokens, padding included)
T     some of these rows: a tile of queries, or the tokens given to a cache
N     raw keys: S, after the history of rows that continue a sequence
M     all keys: N raw ones, then C entries
P     rows of a ring in a decode cache
E     model width (`hidden_size`)
H     query heads
D     head dim
R     RoPE dims, the trailing ones of D: R / 2 pairs
C     entries, one per slot: S // m
m     compress ratio: tokens per window, and so per entry
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
"""Values of `precision=`, as in `jax.numpy.einsum`: "highest", `jax.lax.Precision.HIGHEST`, ...; None for JAX's."""


Size = int | Any
"""The size of an axis: an int, or a symbolic dimension of `jax.export`."""


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Dtype in which logits, softmax, norms and sums are computed: float64 for float64, else float32.

    `jnp.promote_types` is not used: it refuses bfloat16 with float32 under strict dtype promotion.
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def lowest(dtype: DTypeLike) -> float:
    """Lowest finite number of a float dtype: the logit of masked keys, whose softmax weight is then exactly 0.

    Not -inf, which stops a run under `jax_debug_infs`.
    """
    return float(jnp.finfo(dtype).min)


def narrowed(values: Int[Array, "..."] | np.ndarray, low: int, high: int) -> Int32[Array, "..."]:
    """Integers of any width as int32, clipped to [low, high] before the conversion so that none wraps."""
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
