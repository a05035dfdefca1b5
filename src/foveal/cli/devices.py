"""The device that a command computes on."""

from __future__ import annotations

import os


def use_cpu() -> None:
    """Make JAX use the CPU unless JAX_PLATFORMS is set. Setting it here would be too late: foveal has imported jax."""
    if not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")
