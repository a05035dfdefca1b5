"""The layers against transformers' DeepSeek-V4 attention, run here: real ratios, real window, real YaRN.

transformers is an oracle for unpadded rows that start at position 0, and that is all that is compared. Outputs must
agree elementwise. Gradients, ours and transformers', must each agree with the float64 reference, per tensor: element by
element two float32 gradients differ by more than either is worth.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foveal import AttentionConfig, LayerType
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.numerics import assert_close, assert_gradients_close
from tests.nn.layers import build, compiled_reference, every_layer_type, problem, pure_layer

torch = pytest.importorskip("torch")
cache_utils = pytest.importorskip("transformers.cache_utils")
torch.set_num_threads(1)
peers = pytest.importorskip("foveal.testing.peer")

LENGTHS = (1, 3, 127, 128, 129, 489)
FLASH = AttentionConfig.deepseek_v4_flash()
# Flash's ratios, window and RoPE in small widths; 16 of up to 122 entries are selected.
REAL = {name: getattr(FLASH, name) for name in ("csa_ratio", "hca_ratio", "sliding_window", "rope", "compress_rope")}
REAL |= {
    "index_n_heads": 16,
    "index_topk": 16,
}  # with few heads many scores are zero, and torch breaks ties as it likes
SMALL = dataclasses.replace(AttentionConfig.tiny(), **REAL)
CLEAR = 1e-5


def decode(peer, hidden, prompt):
    """transformers' outputs for [1, S, E], through its own cache: a prompt, then token by token."""
    cache = cache_utils.DynamicCache(config=peer.config)
    edges = [0, *range(prompt, hidden.shape[1] + 1)]
    parts = [peer.chunk(hidden[:, start:stop], start, cache) for start, stop in itertools.pairwise(edges)]
    return torch.cat(parts, dim=1)


def clear_seed(reference, make):
    """The first problem whose entries are chosen neither by rounding nor by torch's rule for ties, which it has not."""
    return next(seed for seed in range(50) if reference.margin(*make(seed)[:2], zeros_tie=True) > CLEAR)


@pytest.mark.parametrize("length", LENGTHS)
@every_layer_type
def test_parity(layer_type, length):
    reference = compiled_reference(layer_type, length=max(LENGTHS), **REAL)

    def make(seed):
        return problem(layer_type, seed, batch=1, length=length, **REAL)

    params, x, cotangent = make(clear_seed(reference, make))
    peer = peers.peer_of_params(SMALL, layer_type, params)
    hidden = torch.tensor(x, requires_grad=True)
    theirs = peer(hidden)
    layer = pure_layer(layer_type, **REAL)
    output, gradients = layer.vjp(params, x, None, cotangent)
    assert_close(output, theirs.detach().numpy(), np.float32)
    want, want_gradients = reference.vjp(params, x, None, cotangent)
    assert_close(output, want, np.float32)
    assert_gradients_close(gradients, want_gradients, np.float32)

    theirs.backward(torch.tensor(cotangent))
    named = {"x": hidden, **dict(peer.module.named_parameters())}
    assert named.keys() == {peers.peer_name(name) for name in gradients}
    # Where torch has no gradient, in the indexer and in a compressor without a window, it is zero.
    their_gradients = {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in named.items()}
    expected = {peers.peer_name(name): peers.peer_layout(name, value) for name, value in want_gradients.items()}
    assert_gradients_close(their_gradients, expected, np.float32)


def test_parity_at_flash_head_sizes():
    """64 heads of 512, groups, latents and indexer as in Flash; only the model width is cut."""
    changes = {field.name: getattr(FLASH, field.name) for field in dataclasses.fields(FLASH)}
    changes |= {"hidden_size": 512, "index_topk": 16, "layer_types": (LayerType.CSA,)}
    config, length = dataclasses.replace(FLASH, **changes), 137
    params = random_params(config, LayerType.CSA, 0)
    reference = compiled_reference(LayerType.CSA, length=length, **changes)
    x = random_hidden(clear_seed(reference, lambda seed: (params, random_hidden(seed, 1, length, 512))), 1, length, 512)
    with torch.no_grad():
        theirs = peers.peer_of_params(config, LayerType.CSA, params)(torch.tensor(x)).numpy()
    ours = pure_layer(LayerType.CSA, **changes).forward(params, jnp.asarray(x))
    assert_close(ours, theirs, np.float32)


@every_layer_type
def test_a_prompt_and_40_tokens_through_both_caches(layer_type):
    prompt, length = 230, 270  # a window of 128 is completed on the way

    def make(seed):
        return problem(layer_type, seed, batch=1, length=length, **REAL)

    params, x, _ = make(clear_seed(compiled_reference(layer_type, length=max(LENGTHS), **REAL), make))
    peer = peers.peer_of_params(SMALL, layer_type, params)
    with torch.no_grad():
        theirs = decode(peer, torch.tensor(x), prompt).numpy()
    layer = build(layer_type, params, SMALL)
    out, cache = jax.jit(layer.prefill)(layer.init_cache(1, length), jnp.asarray(x[:, :prompt]))
    step, outputs = jax.jit(layer.decode, donate_argnums=0), [out]
    for t in range(prompt, length):
        out, cache = step(cache, jnp.asarray(x[:, t : t + 1]))
        outputs.append(out)
    assert_close(jnp.concatenate(outputs, axis=1), theirs, np.float32)
