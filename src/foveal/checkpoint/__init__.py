"""Checkpoints: loading and saving attention weights as safetensors files, and converting MaxText's parameters."""

from foveal.checkpoint.files import CheckpointError
from foveal.checkpoint.load import load_attention
from foveal.checkpoint.maxtext import from_maxtext, to_maxtext
from foveal.checkpoint.names import Dialect
from foveal.checkpoint.save import save_attention

__all__ = ["CheckpointError", "Dialect", "from_maxtext", "load_attention", "save_attention", "to_maxtext"]
