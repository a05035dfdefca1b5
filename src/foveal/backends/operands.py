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
    """One call of core attention, whose parts fit each other. A pytree; its gradient is one too.

    Attributes:
        q: [B, S, H, D].
        kv: [B, N, D], key and value of each raw token.
        entries: [B, C, D], key and value of each slot; C = 0 without entries.
        sinks: [H] in the accumulation dtype, or None.
        visibility: who sees what.
        indices: int32 [B, S, K], the selected slots, each one that its query sees and none twice; -1 for none, at any
            place. None for all visible entries.
        tainted: bool [B, S], queries that see a key which was not finite and has been replaced by zeros; None where
            nobody has looked.
        scale: of the logits. Static.
        precision: of the matmuls. Static.
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
        """C."""
        return self.entries.shape[1]

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        """float32, or float64 for float64 inputs: logits, softmax and sums, whatever the inputs."""
        return accumulation_dtype(self.q.dtype)


def settled(array: Array, padding: Array, lost: Array) -> Array:
    """Results as every implementation must give them for queries that see nothing, or what is not finite.

    Args:
        array: output or log-sum-exp.
        padding: bool, broadcasting to it: queries that see nothing. Zeros.
        lost: bool, likewise: queries that see or hold what is not finite. NaN.
    """
    return jnp.where(padding, 0.0, jnp.where(lost, jnp.nan, array))


def silent(lse: Array, padding: Array) -> Array:
    """bool, of lse's shape: queries from which no gradient comes, by their settled log-sum-exp.

    Whatever such a query and its cotangent hold must be zeroed before it meets a key: 0 x NaN is NaN.
    """
    return padding | ~jnp.isfinite(lse)


class Backend(abc.ABC):
    """An implementation of core attention.

    Queries that see nothing, which are those of padding, give zeros, any finite lse, and no gradient to anything,
    whatever they hold. A query that holds NaN gives NaN, and no gradient to any key (`settled`, `silent`). Nothing here
    makes an infinity of what is finite: under `jax_debug_infs` a run would end there.

    Attributes:
        name: what `implementation=` takes.
        quadratic: builds an array of S x S or S x C elements. Such a one runs by name, or where no other can.
        needs: the module that must be installed, and foveal's extra that installs it; None for none.
        block_names: what `configure` takes sizes of, in order; none where there is nothing to choose.
        has_cycles: whether `cycles` can tell any, where no entries are selected.
    """

    name: str
    quadratic: bool
    needs: tuple[str, str] | None = None
    block_names: tuple[str, ...] = ()
    has_cycles: bool = False

    @abc.abstractmethod
    def refusal(self, operands: Operands) -> str | None:
        """Why it cannot do this, or None if it can. Looks at shapes, dtypes and static facts only.

        Sinks may still be in a dtype of their own.
        """

    @abc.abstractmethod
    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """Output [B, S, H, D] in q's dtype and log-sum-exp [B, S, H] in the accumulation dtype.

        The output has the sinks in its denominator, the log-sum-exp is over the keys alone; both are differentiable.
        """

    def configure(
        self, *, heads: int, blocks: Sequence[int] | None = None, sharding: PartitionSpec | None = None
    ) -> Backend:
        """This implementation with other sizes of its blocks, and told how its operands are sharded.

        Args:
            heads: query heads on a device.
            blocks: one size for each of `block_names`; None for its own choice.
            sharding: of q, [B, S, H, D], on the mesh in context.

        Raises:
            ValueError: sizes that it does not have, or that do not fit.
        """
        del heads, sharding
        if blocks is not None:
            raise ValueError(f"blocks: expected none for {self.name!r}, got {tuple(blocks)}")
        return self

    def build_masks(self, heads: int, visibility: Visibility) -> bool:
        """Does the host's part for rows like these, and `heads` on a device; whether there is any."""
        del heads, visibility
        return False

    def cycles(
        self, schedules: Sequence[KernelSchedule], q: jax.ShapeDtypeStruct, visibility: Visibility
    ) -> int | None:
        """Bundles that a core issues in the kernels of a call, a lower bound of its cycles; None if it cannot tell.

        Args:
            schedules: of the program's kernels, from `foveal.schedule.kernel_schedules`.
            q: like the queries of a device, [B, S, H, D].
            visibility: of rows that are one document each.

        Raises:
            ValueError: kernels with other conditional parts than its own.
        """
        del schedules, q, visibility
        return None
