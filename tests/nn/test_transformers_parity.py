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
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, LayerType
from foveal.testing.generators import random_hidden, random_params
from foveal.testing.numerics import assert_close, assert_gradients_close
from foveal.testing.parameters import set_params

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
cache_utils = pytest.importorskip("transformers.cache_utils")
torch.set_num_threads(1)

LAYER_TYPES = tuple(LayerType)
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
# fmt: off
SAME_NAME = (
    "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
)
# fmt: on


def build(config, layer_type, params):
    """transformers' module with our parameters, and a function that runs it on [1, S, E]."""
    yarn = dataclasses.asdict(config.compress_rope.yarn)
    their_config = modeling.DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[str(layer_type)],
        compress_rates={str(t): config.compress_ratio(t) for t in (LayerType.CSA, LayerType.HCA)},
        rope_theta=config.rope.theta,
        compress_rope_theta=config.compress_rope.theta,
        rope_parameters={"rope_type": "yarn", **yarn},
        attn_implementation="eager",
        **{name: getattr(config, name) for name in SAME_NAME},
    )
    module = modeling.DeepseekV4Attention(their_config, 0)
    state = {to_their_name(name): torch.tensor(to_their_layout(name, value)) for name, value in params.items()}
    module.load_state_dict(state, strict=True)
    rotary = modeling.DeepseekV4RotaryEmbedding(their_config)

    def run(hidden):
        positions = torch.arange(hidden.shape[1])[None]
        distance = positions.T - positions
        hidden_from_query = (distance < 0) | (distance >= config.sliding_window)
        mask = torch.zeros(distance.shape).masked_fill(hidden_from_query, float("-inf"))[None, None]
        tables = {label: rotary(hidden, positions, layer_type=label) for label in ("main", "compress")}
        return module(hidden, tables, positions, mask)[0]

    return module, run


def decode(module, config, hidden, prompt):
    """transformers' outputs for [1, S, E], through its own cache: a prompt, then token by token."""
    cache = cache_utils.DynamicCache(config=module.config)
    rotary = modeling.DeepseekV4RotaryEmbedding(module.config)
    edges, outputs = [0, *range(prompt, hidden.shape[1] + 1)], []
    for start, stop in itertools.pairwise(edges):
        positions = torch.arange(start, stop)[None]
        keys = torch.arange(max(start - config.sliding_window + 1, 0), stop)[None]
        distance = positions.T - keys
        unseen = (distance < 0) | (distance >= config.sliding_window)
        mask = torch.zeros(distance.shape).masked_fill(unseen, float("-inf"))[None, None]
        chunk = hidden[:, start:stop]
        tables = {label: rotary(chunk, positions, layer_type=label) for label in ("main", "compress")}
        outputs.append(module(chunk, tables, positions, mask, cache)[0])
    return torch.cat(outputs, dim=1)


def to_their_name(name):
    return name.replace(".kernel", ".weight").replace(".scale", ".weight")


def to_their_layout(name, value):
    if name == "o_a_proj.kernel":  # [G, in, out] -> [G * out, in]
        return value.transpose(0, 2, 1).reshape(-1, value.shape[1]).copy()
    return value.T.copy() if name.endswith(".kernel") else value


def clear_seed(reference, make):
    """The first problem whose entries are chosen neither by rounding nor by torch's rule for ties, which it has not."""
    return next(seed for seed in range(50) if reference.margin(*make(seed)[:2], zeros_tie=True) > CLEAR)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_parity(layer_type, length, pure_layer, compiled_reference, problem):
    reference = compiled_reference(layer_type, length=max(LENGTHS), **REAL)

    def make(seed):
        return problem(layer_type, seed, batch=1, length=length, **REAL)

    params, x, cotangent = make(clear_seed(reference, make))
    module, run = build(SMALL, layer_type, params)
    hidden = torch.tensor(x, requires_grad=True)
    theirs = run(hidden)
    layer = pure_layer(layer_type, optimized=False, **REAL)
    output, gradients = layer.vjp(params, x, None, cotangent)
    assert_close(output, theirs.detach().numpy(), np.float32)
    want, want_gradients = reference.vjp(params, x, None, cotangent)
    assert_close(output, want, np.float32)
    assert_gradients_close(gradients, want_gradients, np.float32)

    theirs.backward(torch.tensor(cotangent))
    named = {"x": hidden, **dict(module.named_parameters())}
    assert named.keys() == {to_their_name(name) for name in gradients}
    # Where torch has no gradient, in the indexer and in a compressor without a window, it is zero.
    their_gradients = {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in named.items()}
    expected = {to_their_name(name): to_their_layout(name, value) for name, value in want_gradients.items()}
    assert_gradients_close(their_gradients, expected, np.float32)


def test_parity_at_flash_head_sizes(pure_layer, compiled_reference):
    """64 heads of 512, groups, latents and indexer as in Flash; only the model width is cut."""
    changes = {field.name: getattr(FLASH, field.name) for field in dataclasses.fields(FLASH)}
    changes |= {"hidden_size": 512, "index_topk": 16, "layer_types": (LayerType.CSA,)}
    config, length = dataclasses.replace(FLASH, **changes), 137
    params = random_params(config, LayerType.CSA, 0)
    reference = compiled_reference(LayerType.CSA, length=length, **changes)
    x = random_hidden(clear_seed(reference, lambda seed: (params, random_hidden(seed, 1, length, 512))), 1, length, 512)
    with torch.no_grad():
        theirs = build(config, LayerType.CSA, params)[1](torch.tensor(x)).numpy()
    ours = pure_layer(LayerType.CSA, optimized=False, **changes).forward(params, jnp.asarray(x))
    assert_close(ours, theirs, np.float32)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_a_prompt_and_40_tokens_through_both_caches(layer_type, compiled_reference, problem):
    prompt, length = 230, 270  # a window of 128 is completed on the way

    def make(seed):
        return problem(layer_type, seed, batch=1, length=length, **REAL)

    params, x, _ = make(clear_seed(compiled_reference(layer_type, length=max(LENGTHS), **REAL), make))
    module, _ = build(SMALL, layer_type, params)
    with torch.no_grad():
        theirs = decode(module, SMALL, torch.tensor(x), prompt).numpy()
    layer = CompressedAttention(SMALL, layer_type=layer_type, rngs=nnx.Rngs(0))
    set_params(layer, params)
    out, cache = jax.jit(layer.prefill)(layer.init_cache(1, length), jnp.asarray(x[:, :prompt]))
    step, outputs = jax.jit(layer.decode, donate_argnums=0), [out]
    for t in range(prompt, length):
        out, cache = step(cache, jnp.asarray(x[:, t : t + 1]))
        outputs.append(out)
    assert_close(jnp.concatenate(outputs, axis=1), theirs, np.float32)
