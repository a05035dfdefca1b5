"""Flax NNX modules: parameters and wiring only, with transformers' names."""

from foveal.nn.activations import ACTIVATION_NAMES
from foveal.nn.attention import CompressedAttention
from foveal.nn.compressor import Compressor
from foveal.nn.grouped_linear import GroupedLinear
from foveal.nn.indexer import LightningIndexer

__all__ = ["ACTIVATION_NAMES", "CompressedAttention", "Compressor", "GroupedLinear", "LightningIndexer"]
