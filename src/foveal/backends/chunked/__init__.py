"""Core attention tile by tile, in memory linear in S, on any device that XLA compiles for."""

from foveal.backends.chunked.backend import Chunked

__all__ = ["Chunked"]
