"""Backend of fused TPU kernels."""

from foveal.backends.tpu.backend import Fused

__all__ = ["Fused"]
