"""The two Splash backends: a static mask, known at trace time, and a mask that is data."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from foveal.backends.operands import Backend, Operands
from foveal.backends.sharded import devices_along, sharding_refusal
from foveal.backends.splash.blocks import SplashBlocks
from foveal.backends.splash.layout import KeyLayout
from foveal.extras import missing
from foveal.geometry import Visibility
from foveal.program import planned, platform
from foveal.schedule import KernelSchedule
from foveal.typing import Array

Results = tuple[Array, Array]

_NEEDS = "tokamax", "tpu"

_MASK_LIMIT = 1 << 35
"""Elements of one batch row's mask beyond which `splash_dynamic` refuses: 185000 rows."""


@dataclasses.dataclass(frozen=True)
class _SplashBackend(Backend):
    """Base of the two backends.

    Attributes:
        blocks: sizes of tiles, or None for the defaults (`SplashBlocks.for_shapes`).
        interpret: emulate a TPU where there is none, very slowly: for tests.
    """

    blocks: SplashBlocks | None = None
    interpret: bool = False

    needs = _NEEDS
    block_names = ("Q", "KV", "Q", "KV", "HEADS")
    has_cycles = True

    def refusal(self, operands: Operands) -> str | None:
        """Reason why no Splash kernel can run this call, or None."""
        if importlib.util.find_spec(_NEEDS[0]) is None:
            return missing("tokamax", "tpu")
        if platform() != "tpu" and not self.interpret:
            return f"its kernels run on TPUs, not on {platform()}"
        if operands.q.dtype not in (jnp.float32, jnp.bfloat16):
            return f"its kernels take float32 and bfloat16, not {operands.q.dtype}"
        if operands.precision not in (None, "default", jax.lax.Precision.DEFAULT):
            return "its kernels have no choice of matmul precision"
        if operands.visibility.continues:
            return "its masks cover keys in the queries' own rows only, not those of a cache"
        return None

    def configure(
        self, *, heads: int, blocks: Sequence[int] | None = None, sharding: PartitionSpec | None = None
    ) -> _SplashBackend:
        """See `Backend`; the sizes are those of `SplashBlocks`: forward, backward, stacked heads."""
        del sharding
        if blocks is None:
            return self
        if len(blocks) != len(self.block_names):
            raise ValueError(
                f"expected {len(self.block_names)} numbers {','.join(self.block_names)}, got {len(blocks)}"
            )
        sizes = SplashBlocks(*blocks)
        if heads % sizes.stacked_heads:
            raise ValueError(f"expected a divisor of a chip's {heads} heads for HEADS, got {sizes.stacked_heads}")
        return dataclasses.replace(self, blocks=sizes)

    def _attend(self, operands: Operands, *, dynamic: bool, sharding: PartitionSpec | None) -> Results:
        # Imported late: Tokamax takes more than a second to import, and need not be installed.
        from foveal.backends.splash.attend import attend
        from foveal.backends.splash.kernel import Call
        from foveal.backends.splash.operands import SplashPlan

        if operands.q.size == 0:
            return jnp.zeros_like(operands.q), jnp.zeros(operands.q.shape[:3], operands.accumulation_dtype)
        operands, visibility = dataclasses.replace(operands, q=planned(operands.q)), operands.visibility
        heads = operands.q.shape[2] // devices_along(sharding, 2)
        sizes, layout = self._sizes(heads, visibility, dynamic=dynamic)
        call = Call(sizes, self.interpret)
        return attend(SplashPlan(call, layout, dynamic, sharding), operands)

    def _sizes(self, heads: int, visibility: Visibility, *, dynamic: bool) -> tuple[SplashBlocks, KeyLayout]:
        from foveal.backends.splash.kernel import CAN_STACK_HEADS

        sizes, length, slots = self.blocks, visibility.documents.shape[1], visibility.slots
        if sizes is None:
            window = visibility.sliding_window
            sizes = SplashBlocks.for_shapes(
                length, slots, heads, sliding_window=window, can_stack=CAN_STACK_HEADS, dynamic=dynamic
            )
        q_block, kv_block = math.lcm(sizes.q, sizes.q_backward), math.lcm(sizes.kv, sizes.kv_backward)
        return sizes, KeyLayout.for_shapes(length, slots, q_block, kv_block)

    def _cycles(
        self, schedules: Sequence[KernelSchedule], q: jax.ShapeDtypeStruct, visibility: Visibility, *, dynamic: bool
    ) -> int | None:
        from foveal.backends.splash.cycles import kernel_cycles
        from foveal.backends.splash.operands import static_mask

        sizes, layout = self._sizes(q.shape[2], visibility, dynamic=dynamic)
        return kernel_cycles(schedules, static_mask(layout, visibility), sizes, q)


@dataclasses.dataclass(frozen=True)
class Splash(_SplashBackend):
    """Tokamax's Splash Attention with a static mask, known at trace time: for sliding and HCA layers.

    At run time the mask is only a list of non-empty tiles and the few distinct partial ones; packed documents add one
    integer per row and per key.

    Attributes:
        sharding: partition spec of q, [B, S, H, D], on the mesh in context, for `jax.shard_map`. None on one device, or
            inside a `shard_map` where every mesh axis is manual. An axis over S or D is refused.
    """

    name = "splash"
    quadratic = False

    sharding: PartitionSpec | None = None

    def refusal(self, operands: Operands) -> str | None:
        """See `Backend`. Also refuses selected entries, unaligned documents and meshes that it cannot shard over."""
        refusal = super().refusal(operands)
        if refusal is not None:
            return refusal
        if operands.indices is not None:
            return "its mask is fixed at trace time, but the selected entries are data"
        documents, ratio = operands.visibility.documents, operands.visibility.compress_ratio
        if ratio and not documents.is_aligned(ratio):
            return (
                f"documents may start anywhere (alignment {documents.alignment}); its mask needs them at multiples of "
                f"compress_ratio {ratio}, as pack_documents(align={ratio}) puts them"
            )
        return sharding_refusal(self.sharding, operands, "Splash(sharding=...) or jax.shard_map")

    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """See `Backend`."""
        return self._attend(operands, dynamic=False, sharding=self.sharding)

    def configure(
        self, *, heads: int, blocks: Sequence[int] | None = None, sharding: PartitionSpec | None = None
    ) -> Splash:
        """See `Backend`."""
        tiles = super().configure(heads=heads, blocks=blocks).blocks
        return dataclasses.replace(self, blocks=tiles, sharding=self.sharding if sharding is None else sharding)

    def build_masks(self, heads: int, visibility: Visibility) -> bool:
        """Build the tiles of the mask, which tracing a call then finds cached."""
        from foveal.backends.splash.operands import static_masks_of

        sizes, layout = self._sizes(heads, visibility, dynamic=False)
        static_masks_of(layout, visibility, sizes)
        return True

    def cycles(
        self, schedules: Sequence[KernelSchedule], q: jax.ShapeDtypeStruct, visibility: Visibility
    ) -> int | None:
        """See `Backend`; None if the program has no Splash kernel."""
        return self._cycles(schedules, q, visibility, dynamic=False)


@dataclasses.dataclass(frozen=True)
class SplashDynamic(_SplashBackend):
    """Splash Attention with a mask that is data: any layer, any documents, at S x (S + C) bytes per batch row."""

    name = "splash_dynamic"
    quadratic = True

    def refusal(self, operands: Operands) -> str | None:
        """See `Backend`. Also refuses masks of more than 2^35 elements, and several devices."""
        refusal = super().refusal(operands)
        if refusal is not None:
            return refusal
        length = operands.q.shape[1]
        if length * (length + operands.visibility.slots) > _MASK_LIMIT:
            return f"a mask of {length} x {length + operands.visibility.slots} elements; {_MASK_LIMIT} is the limit"
        return sharding_refusal(None, operands, "jax.shard_map")

    def __call__(self, operands: Operands) -> tuple[Array, Array]:
        """See `Backend`."""
        return self._attend(operands, dynamic=True, sharding=None)

    def cycles(
        self, schedules: Sequence[KernelSchedule], q: jax.ShapeDtypeStruct, visibility: Visibility
    ) -> int | None:
        """See `Splash.cycles`; holds where all visible entries are used: the non-empty tiles are then the same."""
        return self._cycles(schedules, q, visibility, dynamic=True)
