"""The operands of core attention, and the interface of its implementations."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from foveal.geometry import Visibility
from foveal.schedule import KernelSchedule
from foveal.typing import Array, Precision, accumulation_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Checked operands of one call of core attention. A pytree; its gradient is one too.

    Attributes:
        q: [B, S, H, D].
        kv: [B, N, D], key and value of each raw token.
        entries: [B, C, D], key and value of each slot; C = 0 without entries.
        sinks: [H] in the accumulation dtype, or None.
        visibility: who sees what.
        indices: int32 [B, S, K], the selected slots, each visible to its query and none twice; -1 for none, at any
            position. None for all visible entries.
        tainted: bool [B, S], queries that see a key which was not finite and has been replaced by zeros; None if keys
            were not checked.
        scale: factor on the logits. Static.
        precision: matmul precision. Static.
    """

    __no_type_check__ = True  # JAX builds pytrees of placeholders too: annotations cannot hold then

    q: Array
    kv: Array
    entries: Array
    sinks: Array | None
    visibility: Visibility
    indices: Array | None
    tainted: Array | None
    scale: float = dataclasses.field(metadata={"static": True})
    precision: Precision = dataclasses.field(metadata={"static": True})

    @property
    def slots(self) -> int:
        """C, the number of entry slots."""
        return self.entries.shape[1]

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        """Dtype of logits, softmax and sums: float64 for float64 inputs, float32 for all others."""
        return accumulation_dtype(self.q.dtype)


def settled(array: Array, padding: Array, lost: Array) -> Array:
    """Replace the results of queries that see nothing or something non-finite, as every implementation must.

    Args:
        array: output or log-sum-exp.
        padding: bool, broadcasting to `array`: queries that see nothing, which give zeros.
        lost: bool, broadcasting to `array`: queries that see or hold something non-finite, which give NaN.
    """
    return jnp.where(padding, 0.0, jnp.where(lost, jnp.nan, array))


def silent(lse: Array, padding: Array) -> Array:
    """Bool mask, of lse's shape, of the queries that pass no gradient on, by their settled log-sum-exp.

    Such a query and its cotangent must be zeroed before they meet a key: 0 x NaN is NaN.
    """
    return padding | ~jnp.isfinite(lse)


class Backend(abc.ABC):
    """Implementation of core attention.

    Queries that see nothing, which are those of padding, give zeros, any finite lse and no gradient, whatever they
    hold. A query that holds NaN gives NaN, and no gradient to any key (`settled`, `silent`). Finite operands must not
    produce an infinity, even in between: it would abort a run under `jax_debug_infs`.

    Attributes:
        name: name that `implementation=` takes.
        quadratic: whether it builds an array of S x S or S x C elements. It then runs by name, or where no other can.
        needs: the module that must be installed and foveal's extra that installs it, or None.
        block_names: names of the sizes that `configure` takes, in order; empty if there are none to choose.
        has_cycles: whether `cycles` returns a number for calls without selected entries.
    """

    name: str
    quadratic: bool
    needs: tuple[str, str] | None = None
    block_names: tuple[str, ...] = ()
    has_cycles: bool = False

    @abc.abstractmethod
    def refusal(self, operands: Operands) -> str | None:
        """Reason why it cannot run this call, or None if it can. Reads only shapes, dtypes and static fields.

        The sinks may not be in the accumulation dtype yet.
        """

    @abc.abstractmethod
    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """Output [B, S, H, D] in q's dtype and log-sum-exp [B, S, H] in the accumulation dtype.

        The output's denominator includes the sinks, the log-sum-exp is over the keys alone. Both are differentiable.
        """

    def configure(
        self, *, heads: int, blocks: Sequence[int] | None = None, sharding: PartitionSpec | None = None
    ) -> Backend:
        """Return this implementation with other block sizes, or with the sharding of its operands.

        Args:
            heads: query heads per device.
            blocks: one size for each of `block_names`; None for its default.
            sharding: of q, [B, S, H, D], on the mesh in context.

        Raises:
            ValueError: sizes that it does not take, or that do not fit.
        """
        del heads, sharding
        if blocks is not None:
            raise ValueError(f"blocks: expected none for {self.name!r}, got {tuple(blocks)}")
        return self

    def build_masks(self, heads: int, visibility: Visibility) -> bool:
        """Build the masks that tracing needs for such rows, with `heads` per device; return False if there are none."""
        del heads, visibility
        return False

    def cycles(
        self, schedules: Sequence[KernelSchedule], q: jax.ShapeDtypeStruct, visibility: Visibility
    ) -> int | None:
        """Bundles that a core issues in the kernels of a call, a lower bound of its cycles; None if unknown.

        Args:
            schedules: schedules of the program's kernels, from `foveal.schedule.kernel_schedules`.
            q: shape and dtype of one device's queries, [B, S, H, D].
            visibility: who sees what, in rows that are one document each.

        Raises:
            ValueError: the kernels do not have the conditional parts that it expects.
        """
        del schedules, q, visibility
        return None
