"""Changes of file while a layer is traced: how often a reader of the code that runs must jump.

A change is a call of a function of `src/foveal` in another file than the last such call. The layers are those of
`tiny()`, S = 64, B = 1, and annotations are not checked: the counts depend only on the code.

    python -m benchmarks.file_changes [--trace]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import foveal
from foveal import AttentionConfig, CompressedAttention, LayerType

ROOT = str(pathlib.Path(foveal.__file__).parent) + os.sep
LENGTH = 64


def files_entered(function: Callable[..., Any], *args: Any) -> list[str]:
    """The files of `src/foveal` that tracing `function(*args)` goes through, one per change."""
    entered: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and (not entered or entered[-1] != file):
            entered.append(file)

    sys.setprofile(profile)
    try:
        jax.make_jaxpr(function)(*args)
    finally:
        sys.setprofile(None)
    return [file.removeprefix(ROOT) for file in entered]


def programs(layer_type: LayerType) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Forward pass, forward and backward pass, and a decode step of a layer, with their arguments."""
    layer = CompressedAttention(AttentionConfig.tiny(), layer_type=layer_type, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jnp.zeros((1, LENGTH, layer.config.hidden_size))

    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    def loss(state: Any, x: Any) -> Any:
        return forward(state, x).sum()

    def decode(state: Any, cache: Any, x: Any) -> Any:
        return nnx.merge(graph, state).decode(cache, x)

    return {
        "forward": (forward, (state, x)),
        "forward and backward": (jax.grad(loss, argnums=(0, 1)), (state, x)),
        "decode": (decode, (state, layer.init_cache(1, LENGTH), x[:, :1])),
    }


def main() -> None:
    """Print the counts of each layer type."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", action="store_true", help="also print the files in order")
    arguments = parser.parse_args()
    for layer_type in LayerType:
        for name, (function, args) in programs(layer_type).items():
            entered = files_entered(function, *args)
            print(f"{layer_type.name:<8} {name:<21} {len(entered):4}")
            if arguments.trace:
                print("\n".join(f"    {file}" for file in entered))


if __name__ == "__main__":
    main()
