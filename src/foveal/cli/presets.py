"""Published models as arguments."""

from __future__ import annotations

from foveal.config import AttentionConfig

PRESETS = {
    "flash": AttentionConfig.deepseek_v4_flash,
    "pro": AttentionConfig.deepseek_v4_pro,
    "tiny": AttentionConfig.tiny,
}
"""Models by the name that `--preset` takes."""
