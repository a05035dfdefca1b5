"""What a backend is asked to do, and what a backend is."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from foveal.backends.program import platform
from foveal.geometry import Visibility
from foveal.typing import Array, Precision, accumulation_dtype


@dataclasses.dataclass(frozen=True)
class AttentionRequest:
    """One validated call of core attention.

    Attributes:
        q: [B, S, H, D].
        kv: [B, S, D], key and value of each raw token.
        entries: [B, C, D], key and value of each slot; None where the layer has none or C is 0.
        visibility: who sees what.
        indices: int32 [B, S, K], the selected slots, each one that its query sees and none twice; -1 for none, at any
            place. None for all visible entries.
        sinks: [H] in the accumulation dtype, or None.
        tainted: bool [B, S], queries that see a key which was not finite and has been replaced by zeros: their output
            and log-sum-exp are NaN, and no gradient comes from them. Or None for none.
        scale: of the logits.
        precision: of the matmuls.
    """

    q: Array
    kv: Array
    entries: Array | None
    visibility: Visibility
    indices: Array | None
    sinks: Array | None
    scale: float
    precision: Precision
    tainted: Array | None = None

    @property
    def arrays(self) -> Any:
        """Every array of it, as a pytree."""
        operands = (self.q, self.kv, self.entries, self.indices, self.sinks, self.tainted)
        return *operands, self.visibility

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        """float32, or float64 for float64 inputs: logits, softmax and sums, whatever the inputs."""
        return accumulation_dtype(self.q.dtype)

    @property
    def platform(self) -> str:
        """Where this will run: "cpu", "gpu" or "tpu"."""
        return platform()


class Backend(abc.ABC):
    """An implementation of core attention.

    Queries that see nothing, which are those of padding, give zeros, any finite lse, and no gradient to anything,
    whatever they hold. A query that holds NaN gives NaN, and no gradient to any key. Nothing here makes an infinity of
    what is finite: under `jax_debug_infs` a run would end there.

    Attributes:
        name: what `implementation=` takes.
        quadratic: builds an array of S x S or S x C elements. Such a one runs by name, or where no other can.
    """

    name: str
    quadratic: bool

    @abc.abstractmethod
    def refusal(self, request: AttentionRequest) -> str | None:
        """Why it cannot do this, or None if it can. Looks at shapes, dtypes and static facts only."""

    @abc.abstractmethod
    def __call__(self, request: AttentionRequest) -> tuple[Array, Array]:
        """Output [B, S, H, D] in q's dtype and log-sum-exp [B, S, H] in the accumulation dtype.

        The output has the sinks in its denominator, the log-sum-exp is over the keys alone; both are differentiable.
        """


def membership(indices: Array, slots: int) -> Array:
    """bool [B, T, slots]: which slots stand in the indices [B, T, K]; those that are no slot are none.

    Mapped over batch and queries, not indexed by them: a sharded batch then stays where it is.
    """
    target = jnp.where((indices < 0) | (indices >= slots), slots, indices)  # one more column collects what is none
    return jax.vmap(jax.vmap(lambda t: jnp.zeros(slots + 1, bool).at[t].set(True)))(target)[..., :slots]
