"""Core attention tile by tile, in memory linear in S, on anything XLA compiles for."""

from foveal.backends.chunked.backend import Chunked

__all__ = ["Chunked"]
