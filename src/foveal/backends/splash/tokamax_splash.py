"""Imports of Tokamax's Splash Attention kernels, which are private to it: the only place that knows their path.

Tried with 0.0.12, 0.0.17 and 0.0.18.dev20261026. The last has moved them, with the same arguments.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("tokamax._src.ops.splash_attention") is None:
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        base,
        splash_attention_kernel,
        splash_attention_mask,
        splash_attention_mask_info,
    )
else:
    from tokamax._src.ops.splash_attention import (
        base,
        splash_attention_kernel,
        splash_attention_mask,
        splash_attention_mask_info,
    )

Mask = splash_attention_mask.Mask
MaskInfo = splash_attention_mask_info.MaskInfo

__all__ = ["Mask", "MaskInfo", "base", "splash_attention_kernel", "splash_attention_mask_info"]
