"""The backend of fused TPU kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from foveal.backends.operands import Backend, Operands
from foveal.backends.sharded import devices_along, run_sharded, sharding_refusal
from foveal.backends.tpu.attend import attend
from foveal.backends.tpu.cycles import kernel_cycles
from foveal.backends.tpu.plan import LANES, SUBLANES, FusedSizes, vmem_needed
from foveal.checks import as_int
from foveal.geometry import Visibility
from foveal.program import planned, platform
from foveal.schedule import KernelSchedule
from foveal.typing import Array

_PRECISIONS = (None, "default", "highest", jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Fused(Backend):
    """Foveal's TPU kernels: for sliding and HCA layers, documents anywhere, and rows that continue others.

    They have been compiled for TPUs and run in JAX's emulator of them, but not on a TPU. Under `jax.vmap` they run once
    for each mapped element.

    Attributes:
        sharding: partition spec of q, [B, S, H, D], on the mesh in context, for `jax.shard_map`. None on one device, or
            inside a `shard_map` where every mesh axis is manual. An axis over S or D is refused.
        block_slots: slots per step of the loop over a tile's entries, a multiple of 16; by default what suits the chip.
        interpret: emulate a TPU where there is none, very slowly: for tests.

    Raises:
        ValueError: `block_slots` is not a multiple of 16.
    """

    name = "fused"
    quadratic = False
    block_names = ("SLOTS",)
    has_cycles = True

    sharding: PartitionSpec | None = None
    block_slots: int | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        """Check the block size."""
        if self.block_slots is not None and as_int("block_slots", self.block_slots, SUBLANES) % SUBLANES:
            raise ValueError(f"block_slots: expected a multiple of {SUBLANES}, got {self.block_slots}")

    def refusal(self, operands: Operands) -> str | None:
        """See `Backend`. Refuses selected entries, and sizes that the kernels have no tiles for."""
        if platform() != "tpu" and not self.interpret:
            return f"its kernels run on TPUs, not on {platform()}"
        if operands.q.dtype not in (jnp.float32, jnp.bfloat16):
            return f"its kernels take float32 and bfloat16, not {operands.q.dtype}"
        if operands.indices is not None:
            return "its kernels attend to all visible entries, not to selected ones"
        if operands.precision not in _PRECISIONS:
            return f"its kernels take the precisions 'default' and 'highest', not {operands.precision!r}"
        if not operands.scale > 0.0:
            return f"its kernels need a scale above 0, not {operands.scale}"
        dim = operands.q.shape[3]
        if dim % LANES:
            return f"its tiles are of whole vectors: head dims that are multiples of {LANES}, not {dim}"
        refusal = sharding_refusal(self.sharding, operands, "Fused(sharding=...) or jax.shard_map")
        return refusal or self._too_large(operands)

    def _too_large(self, operands: Operands) -> str | None:
        """Reason why the kernels do not fit VMEM, or None."""
        heads = operands.q.shape[2] // devices_along(self.sharding, 2)
        plan = self._sizes.plan(operands, heads=heads, backward=True)
        needed = vmem_needed(plan, operands.q.dtype)
        if needed <= plan.vmem_bytes:
            return None
        return (
            f"its kernels would need {needed >> 20} MiB of VMEM for {heads} heads and {plan.slots} entries, "
            f"{plan.vmem_bytes >> 20} MiB is the limit"
        )

    def configure(
        self, *, heads: int, blocks: Sequence[int] | None = None, sharding: PartitionSpec | None = None
    ) -> Fused:
        """See `Backend`."""
        del heads
        if blocks is not None and len(blocks) != len(self.block_names):
            raise ValueError(f"expected 1 number, {self.block_names[0]}, got {len(blocks)}")
        slots = self.block_slots if blocks is None else blocks[0]
        return dataclasses.replace(self, block_slots=slots, sharding=self.sharding if sharding is None else sharding)

    def cycles(
        self, schedules: Sequence[KernelSchedule], q: jax.ShapeDtypeStruct, visibility: Visibility
    ) -> int | None:
        """See `Backend`; documents may be packed. None if the program has none of its kernels."""
        _, length, heads, dim = q.shape
        size = length, heads, dim
        forward, backward = (self._sizes.plan_for(size, visibility, backward=b) for b in (False, True))
        return kernel_cycles(schedules, forward, backward, visibility)

    @property
    def _sizes(self) -> FusedSizes:
        return FusedSizes(self.block_slots, self.interpret)

    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """See `Backend`."""
        if operands.q.size == 0:
            return jnp.zeros_like(operands.q), jnp.zeros(operands.q.shape[:3], operands.accumulation_dtype)
        operands = dataclasses.replace(operands, q=planned(operands.q))
        return run_sharded(functools.partial(attend, self._sizes), operands, self.sharding)
