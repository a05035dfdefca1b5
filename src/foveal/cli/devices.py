"""What a command computes on."""

from __future__ import annotations

import os


def use_cpu() -> None:
    """Unless JAX_PLATFORMS says otherwise. It would come too late here: importing foveal has imported jax."""
    if not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")
