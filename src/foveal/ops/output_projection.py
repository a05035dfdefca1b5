"""Grouped half of the output projection."""

from __future__ import annotations

import jax.numpy as jnp

from foveal.checks import as_array, as_precision
from foveal.meshes import any_mesh
from foveal.typing import Array, Float, Precision


@any_mesh(like="x", dims=3)
def grouped_projection(
    x: Float[Array, "B S H D"], kernel: Float[Array, "G width L"], *, precision: Precision = None
) -> Float[Array, "B S latents"]:
    """Project G contiguous groups of heads, each by its own matrix, and concatenate the results.

    Heads stay in order; group g holds heads g H/G ... (g + 1) H/G - 1, flattened to N = (H / G) D. No bias, norm or
    activation comes between this and the projection to the model width that follows. Technical report, arXiv
    2606.19348, section 2.3.1 (grouped output projection).

    Args:
        x: attention outputs, [B, S, H, D].
        kernel: [G, (H / G) D, L].
        precision: matmul precision.

    Returns:
        [B, S, G * L] in x's dtype.

    Raises:
        ValueError: H is not a multiple of G, or the kernel's second axis is not (H / G) D.
    """
    x, kernel = as_array("x", x, "B S H D"), as_array("kernel", kernel, "G width L")
    precision = as_precision(precision)
    heads, dim = x.shape[2:]
    groups, width, _ = kernel.shape
    if not groups or heads % groups or width * groups != heads * dim:
        raise ValueError(f"kernel: expected [G, H * D / G, L] for x of shape {x.shape}, got shape {kernel.shape}")
    return project_groups(x, kernel, precision)


def project_groups(x: Array, kernel: Array, precision: Precision) -> Array:
    """`grouped_projection` for checked arguments."""
    batch, length = x.shape[:2]
    groups, width, latent = kernel.shape
    grouped = x.reshape(batch, length, groups, width)
    projected = jnp.einsum("bsgn,gnl->bsgl", grouped, kernel.astype(x.dtype), precision=precision)
    return projected.reshape(batch, length, groups * latent)
