"""Wrong arguments of everything public: a ValueError that names the argument, before anything is computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import foveal
from foveal import (
    AttentionCache,
    AttentionConfig,
    CacheStack,
    CompressedAttention,
    Documents,
    LayerType,
    RopeConfig,
    Visibility,
    WindowLayout,
)
from foveal.nn.parameters import Numerics

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

B, S, H, D, E, W, M, K = 2, 8, 2, 4, 64, 4, 2, 2
C = S // M
CONFIG = AttentionConfig.tiny()
NUMERICS = Numerics(jnp.float32, jnp.float32, None, 0.02)
RNGS = nnx.Rngs(0)
DOCUMENTS = Documents.unpacked(B, S)
VISIBILITY = Visibility(DOCUMENTS, W, M)
LAYOUT = WindowLayout.of(DOCUMENTS, M)
IDS = np.array([[1, 1, 1, 1, 2, 2, 2, 0]] * B)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


TABLE = foveal.RopeTable(floats(B, S, 1), floats(B, S, 1))  # pyright: ignore[reportArgumentType]
SLOTS = np.zeros((B, S, K), np.int32)
TEACHER = {"q": floats(B, S, H, D), "entries": floats(B, C, D), "lse": floats(B, S, H), "sinks": floats(H)}
INDEX = {"index_q": floats(B, S, 3, D), "index_weights": floats(B, S, 3), "index_keys": floats(B, C, D)}
CORE = {"q": floats(B, S, H, D), "kv": floats(B, S, D), "entries": floats(B, C, D), "visibility": VISIBILITY}
SELECT = {"q": INDEX["index_q"], "weights": INDEX["index_weights"], "keys": INDEX["index_keys"]}
COMPRESSOR = {"hidden_size": E, "head_dim": D, "ratio": M, "overlap": True, "epsilon": 1e-6}
OF_A_LAYER = {"layer_type": "csa", "rngs": RNGS}

CALLS = {
    "core_attention": (foveal.core_attention, CORE | {"indices": SLOTS, "sinks": floats(H)}),
    "explain": (foveal.explain, CORE | {"indices": SLOTS, "sinks": floats(H)}),
    "select_entries": (foveal.select_entries, SELECT | {"visibility": VISIBILITY, "top_k": K}),
    "indexer_loss": (foveal.indexer_loss, INDEX | TEACHER | {"visibility": VISIBILITY, "indices": SLOTS}),
    "indexer_recall": (foveal.indexer_recall, {"indices": SLOTS} | TEACHER | {"visibility": VISIBILITY}),
    "pool_windows": (
        foveal.pool_windows,
        {"kv": floats(B, S, D), "gate": floats(B, S, D), "position_bias": floats(M, D), "layout": LAYOUT}
        | {"overlap": False},
    ),
    "apply_rope": (foveal.apply_rope, {"x": floats(B, S, D), "table": TABLE}),
    "rope_table": (foveal.rope_table, {"positions": IDS, "rope": RopeConfig(1e4), "rope_dim": 2}),
    "rope_frequencies": (foveal.rope_frequencies, {"rope": RopeConfig(1e4), "rope_dim": 2}),
    "grouped_projection": (foveal.grouped_projection, {"x": floats(B, S, H, D), "kernel": floats(2, D, 3)}),
    "Documents": (Documents, {"document_start": np.zeros((B, S), np.int32)}),
    "unpacked": (Documents.unpacked, {"batch": B, "length": S}),
    "from_segment_ids": (Documents.from_segment_ids, {"segment_ids": IDS}),
    "from_cu_seqlens": (Documents.from_cu_seqlens, {"cu_seqlens": [0, 4], "length": S}),
    "from_lengths": (Documents.from_lengths, {"lengths": [4, 2], "length": S}),
    "continuing": (Documents.continuing, {"lengths": [4, 2], "counts": [1, 1], "size": 2}),
    "Visibility": (Visibility, {"documents": DOCUMENTS, "sliding_window": W, "compress_ratio": M}),
    "WindowLayout.of": (WindowLayout.of, {"documents": DOCUMENTS, "ratio": M}),
    "pack_documents": (foveal.pack_documents, {"documents": [floats(3)], "row_length": S}),
    "unpack": (foveal.unpack, {"x": floats(S), "cu_seqlens": [0, 4]}),
    "left_aligned": (foveal.left_aligned, {"x": floats(B, S), "lengths": [4, 2]}),
    "SplashBlocks": (foveal.SplashBlocks, {"q": 128, "kv": 128, "q_backward": 256, "kv_backward": 256}),
    "CompressedAttention": (CompressedAttention, {"config": CONFIG} | OF_A_LAYER),
    "LightningIndexer": (foveal.LightningIndexer, {"config": CONFIG, "numerics": NUMERICS, "rngs": RNGS}),
    "Compressor": (foveal.Compressor, COMPRESSOR | {"numerics": NUMERICS, "rngs": RNGS}),
    "GroupedLinear": (
        foveal.GroupedLinear,
        {"in_features": D, "out_features": 3, "groups": 2, "numerics": NUMERICS, "rngs": RNGS},
    ),
    "Numerics": (Numerics, {"dtype": jnp.float32, "param_dtype": jnp.float32, "precision": None, "init_std": 0.02}),
    "compress_ratio": (CONFIG.compress_ratio, {"layer_type": "csa"}),
    "layer_type": (CONFIG.layer_type, {"layer_index": 0}),
    "AttentionCache": (AttentionCache.init, {"config": CONFIG, "layer_type": "csa", "batch": B, "capacity": S}),
    "CacheStack": (CacheStack.init, {"config": CONFIG, "batch": B, "capacity": S}),
    "recent_keys": (AttentionCache.init(CONFIG, "hca", batch=B, capacity=S).recent_keys, {"count": 1}),
    "WindowLayout.continuing": (
        WindowLayout.continuing,
        {"lengths": [1, 2], "counts": [1, 0], "size": 1, "ratio": M, "history": 1},
    ),
    "at_start": (LAYOUT.at_start, {"rows": floats(B, S, D)}),
    "gather": (LAYOUT.gather, {"rows": floats(B, S, D)}),
    "entry_slots": (LAYOUT.entry_slots, {"capacity": C}),
    "is_aligned": (DOCUMENTS.is_aligned, {"multiple": M}),
}

NO_FLOATS = [np.zeros(3, np.int32), [1.0], None, 1.0, "x", floats()]
NO_INT = [True, 2.0, "2", -1, np.float32(2), np.array(2)]
NO_SIZE = [*NO_INT, 0]
NO_SCALE = [True, np.nan, np.inf, "1", 1j, floats(1)]
NO_PRECISION = ["hi", 3, jnp.float32]
NO_DTYPE = ["bf16", np.int32, jnp.float8_e4m3fn, complex, None]
NO_SLOTS = [floats(B, S, K), SLOTS[0], SLOTS.tolist(), SLOTS[:, :1], SLOTS > 0]
NO_VISIBILITY = [np.ones((B, S, S), bool), DOCUMENTS, IDS, None]
NO_INTEGERS = [None, "ab", [1.5, 2.0], [True, False], [[1], [2, 3]], floats(B), object()]
NO_RNGS = [0, None, jax.random.key(0)]
NO_CONFIG = [{}, CONFIG.to_hf_config(), None, "flash"]

REFUSED = {
    "core_attention": dict.fromkeys(("q", "kv"), NO_FLOATS)
    | {"entries": [*NO_FLOATS[:2], None], "indices": NO_SLOTS, "sinks": [*NO_FLOATS[:2], floats(H + 1)]}
    | {
        "scale": NO_SCALE,
        "precision": NO_PRECISION,
        "visibility": NO_VISIBILITY,
        "implementation": ["fast", 3, floats(2)],
    },
    "select_entries": dict.fromkeys(("q", "weights", "keys"), NO_FLOATS)
    | {"top_k": NO_SIZE, "block_size": NO_SIZE, "precision": NO_PRECISION, "visibility": NO_VISIBILITY},
    "indexer_loss": dict.fromkeys(("index_q", "index_weights", "index_keys", "q", "entries", "lse"), NO_FLOATS)
    | {"sinks": [*NO_FLOATS[:2], floats(H + 1)], "indices": NO_SLOTS, "scale": NO_SCALE, "precision": NO_PRECISION}
    | {"visibility": NO_VISIBILITY, "denominator": ["some", None, floats(3)]},
    "indexer_recall": dict.fromkeys(("q", "entries", "lse"), NO_FLOATS)
    | {"indices": NO_SLOTS, "sinks": NO_FLOATS[:2], "scale": NO_SCALE, "precision": NO_PRECISION}
    | {"visibility": NO_VISIBILITY},
    "pool_windows": dict.fromkeys(("kv", "gate", "position_bias"), NO_FLOATS)
    | {"layout": [DOCUMENTS, VISIBILITY, None], "overlap": [1, None, "yes"]},
    "apply_rope": {"x": NO_FLOATS, "inverse": [1, None], "table": [None, floats(B, S, 1), (floats(1), floats(1))]},
    "rope_table": {"positions": [*NO_INTEGERS, IDS[0], [1, 2], floats(B, S)], "rope": [1e4, None], "rope_dim": NO_INT},
    "rope_frequencies": {"rope": [1e4, None, CONFIG], "rope_dim": [*NO_INT, 3, 0]},
    "grouped_projection": {"x": NO_FLOATS, "kernel": [*NO_FLOATS, floats(0, D, 3)], "precision": NO_PRECISION},
    "Documents": {
        "document_start": [*NO_INTEGERS, IDS, [0, 0], floats(B, S), [[2, 0]], [[0, 0, 1]], [[-1, -1]], [[0, 0, 5]]],
        "alignment": NO_INT,
        "padded": [0, None],
        "first_row": [*(value for value in NO_INTEGERS if value is not None), [1], np.zeros((3, 1), int)],
    },
    "unpacked": {"batch": NO_INT, "length": NO_INT},
    "from_segment_ids": {"segment_ids": [*NO_INTEGERS, IDS[0], IDS * -1, [1, 2], IDS > 0], "alignment": NO_INT},
    "from_cu_seqlens": {"cu_seqlens": [*NO_INTEGERS, [1, 4], [0, 4, 2], [0, 9], []], "length": NO_INT},
    "from_lengths": {"lengths": [*NO_INTEGERS, [9], [-1], [[4, 5]], 4], "length": NO_INT, "alignment": NO_INT},
    "continuing": {"lengths": [*NO_INTEGERS, [-1, 0], 4], "counts": [*NO_INTEGERS, [1], [3, 0]], "size": NO_INT},
    "Visibility": {"documents": [IDS, W, None, VISIBILITY], "sliding_window": [*NO_INT, 0, DOCUMENTS]}
    | {
        "compress_ratio": [*NO_INT, None],
        "history": NO_INT,
        "entries": [4, (4, None), "all", foveal.EntryRange(0, None)],
    },
    "WindowLayout.of": {"documents": [IDS, VISIBILITY, None], "ratio": NO_SIZE},
    "pack_documents": {"documents": [[]], "row_length": NO_SIZE, "align": NO_SIZE},
    "unpack": {"x": [[1.0], None, floats()], "cu_seqlens": [*NO_INTEGERS, [[0]], [0, 9]], "max_length": NO_INT},
    "left_aligned": {"x": [[[1.0]], None, floats(S)], "lengths": [*NO_INTEGERS, [1], [9, 0], [-1, 0], 4]},
    "SplashBlocks": {"q": [*NO_INT, 0, 100], "kv_backward": [*NO_INT, 192], "stacked_heads": NO_SIZE},
    "CompressedAttention": {"config": NO_CONFIG, "layer_type": ["full", 3, floats(1)], "dtype": NO_DTYPE}
    | {"param_dtype": NO_DTYPE, "precision": NO_PRECISION, "rngs": NO_RNGS},
    "LightningIndexer": {"config": NO_CONFIG, "numerics": [None, jnp.float32], "rngs": NO_RNGS},
    "Compressor": dict.fromkeys(("hidden_size", "head_dim", "ratio"), NO_SIZE)
    | {"overlap": [1, None], "epsilon": [0.0, True, np.nan], "numerics": [None], "rngs": NO_RNGS},
    "GroupedLinear": dict.fromkeys(("in_features", "out_features", "groups"), NO_SIZE)
    | {"numerics": [None, "highest"], "rngs": NO_RNGS},
    "Numerics": {"dtype": NO_DTYPE, "param_dtype": NO_DTYPE, "precision": NO_PRECISION, "init_std": [-1.0, True]},
    "compress_ratio": {"layer_type": ["full", 3, None]},
    "layer_type": {"layer_index": [*NO_INT, 3]},
    "AttentionCache": {"config": NO_CONFIG, "layer_type": ["full", 3], "dtype": NO_DTYPE}
    | {"batch": NO_INT, "capacity": NO_INT, "max_rollback": NO_INT},
    "CacheStack": {"config": NO_CONFIG, "dtype": NO_DTYPE},
    "recent_keys": {"count": [*NO_INT, CONFIG.sliding_window + 1]},
    "WindowLayout.continuing": {"lengths": NO_INTEGERS, "counts": [*NO_INTEGERS, [1]], "ratio": NO_SIZE}
    | {"size": NO_INT, "history": NO_INT},
    "at_start": {"rows": [None, [1.0], floats(B, S), floats(B, S - 1, D)]},
    "gather": {"rows": [None, [1.0], floats(B, S), floats(B, S - 1, D)]},
    "entry_slots": {"capacity": NO_INT},
    "is_aligned": {"multiple": NO_SIZE},
}
REFUSED["core_attention"]["return_lse"] = ["no", 1, None]
REFUSED["explain"] = {name: values for name, values in REFUSED["core_attention"].items() if name != "return_lse"}
CASES = [(call, name) for call, names in REFUSED.items() for name in names]


@pytest.mark.parametrize(("call", "name"), CASES, ids=[".".join(case) for case in CASES])
def test_a_wrong_argument_is_refused_by_its_name(call, name):
    function, arguments = CALLS[call]
    for value in REFUSED[call][name]:
        with pytest.raises(ValueError, match=rf"^{name}\b.*: expected .*got ") as error:
            function(**arguments | {name: value})
        assert len(str(error.value)) < 400, "an array in a message"


@pytest.mark.parametrize("call", ["Documents", "unpacked", "from_lengths", "Visibility", "WindowLayout.of", "unpack"])
def test_the_calls_of_the_table_are_right_otherwise(call):
    function, arguments = CALLS[call]
    function(**arguments)


def abstract(make):
    """A module without values, which nothing may compute with."""
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


MODULES = {
    "Compressor": lambda rngs: foveal.Compressor(**COMPRESSOR, numerics=NUMERICS, rngs=rngs),
    "LightningIndexer": lambda rngs: foveal.LightningIndexer(CONFIG, numerics=NUMERICS, rngs=rngs),
    "GroupedLinear": lambda rngs: foveal.GroupedLinear(D, 3, 2, numerics=NUMERICS, rngs=rngs),
    "CompressedAttention": lambda rngs: CompressedAttention(CONFIG, layer_type="CSA", rngs=rngs),
}


@pytest.mark.parametrize("name", MODULES)
def test_calls_of_modules_are_refused_by_name(name):
    module = abstract(MODULES[name])
    others = () if name in ("GroupedLinear", "CompressedAttention") else (LAYOUT, TABLE)
    for value in (*NO_FLOATS, floats(B, S, E + 1)):
        with pytest.raises(ValueError, match=r"^x: expected floats \[B, S, .*got "):
            module(value, *others)
    if name == "LightningIndexer":
        with pytest.raises(ValueError, match=r"^q_residual: expected floats \[B, S, L\]"):
            module.queries(floats(B, S, E), [1.0], TABLE)


def test_calls_of_a_layer_are_refused_by_name():
    layer = abstract(MODULES["CompressedAttention"])
    x = floats(B, S, E)
    for name, values in {
        "segment_ids": [*NO_INTEGERS[1:], IDS[0], IDS[:, :4], IDS.tolist()[:1], DOCUMENTS],
        "documents": [IDS, VISIBILITY, Documents.unpacked(B, S + 1)],
        "select": ["some", None, floats(2)],
    }.items():
        for value in values:
            for call in (layer, layer.indexer_recall):
                if (call, name) != (layer.indexer_recall, "select"):
                    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
                        call(x, **{name: value})


def test_lengths_of_the_next_tokens_are_refused_by_name():
    layer = abstract(MODULES["CompressedAttention"])
    cache = foveal.AttentionCache.init(CONFIG, LayerType.CSA, batch=B, capacity=12)
    for lengths in (*NO_INTEGERS[1:], [1], [9, 1], [-1, 0], 3, [[1, 2]]):
        with pytest.raises(ValueError, match=r"^lengths: expected .*got "):
            layer.prefill(cache, floats(B, S, E), lengths)
    short = foveal.AttentionCache.init(CONFIG, LayerType.CSA, batch=B, capacity=6)
    with pytest.raises(ValueError, match=re.escape("what the cache has room for, 6 of 6, got 7 at 1")):
        layer.decode(short, floats(B, S, E), [6, 7])


@pytest.mark.parametrize("name", ["sliding", "csa", "hca", "CSA", "Hca", "SLIDING", "Sliding_Attention"])
def test_layer_types_have_short_names_in_any_case(name):
    expected = LayerType[name.split("_")[0].upper()]
    assert LayerType(name) is expected
    assert CONFIG.compress_ratio(name) == CONFIG.compress_ratio(expected)
    assert CONFIG.rope_for(name) == CONFIG.rope_for(expected)
    assert abstract(lambda rngs: CompressedAttention(CONFIG, layer_type=name, rngs=rngs)).layer_type is expected
    assert foveal.AttentionCache.init(CONFIG, name, batch=1, capacity=4).batch == 1
    read = AttentionConfig.from_hf_config(CONFIG.to_hf_config() | {"layer_types": [name] * 3})
    assert read.layer_types == (expected,) * 3
