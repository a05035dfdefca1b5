"""Useful work, counted from the geometry: against brute force, the layer's own kernels, and the published sizes."""

import jax
import numpy as np
import pytest
from flax import nnx

from foveal import AttentionConfig, CompressedAttention, Documents, LayerType
from foveal.flops import Cost, core_cost, indexer_cost, layer_cost
from foveal.testing.generators import random_segment_ids
from foveal.testing.parameters import get_params
from foveal.testing.reference import reference_visibility

TINY = AttentionConfig.tiny()
FLASH = AttentionConfig.deepseek_v4_flash()
BATCH, LENGTH = 3, 60  # 60 is no multiple of HCA's 8
SEGMENT_IDS = {
    "unpacked": np.ones((BATCH, LENGTH), np.int32),
    "packed": random_segment_ids(0, BATCH, LENGTH, max_document=33, padding=False),
    "padded": random_segment_ids(1, BATCH, LENGTH, max_document=33),
}
every_layer = pytest.mark.parametrize("kind", LayerType)
every_packing = pytest.mark.parametrize("packing", SEGMENT_IDS)


def documents_of(packing: str) -> Documents:
    if packing == "unpacked":
        return Documents.unpacked(BATCH, LENGTH)
    return Documents.from_segment_ids(SEGMENT_IDS[packing])


def counted(kind: LayerType, packing: str) -> tuple[int, np.ndarray]:
    """Raw keys seen by all queries together, and entries seen by each, before any selection."""
    masks = reference_visibility(SEGMENT_IDS[packing], TINY.sliding_window, TINY.compress_ratio(kind))
    return int(masks[0].sum()), masks[1].sum(-1)


def kernels(config: AttentionConfig, kind: LayerType) -> dict[str, int]:
    """Elements of everything in the layer that tokens are multiplied with."""
    shapes = jax.eval_shape(lambda: get_params(CompressedAttention(config, layer_type=kind, rngs=nnx.Rngs(0))))
    return {name: array.size for name, array in shapes.items() if array.ndim >= 2 and "position_bias" not in name}


@every_packing
@every_layer
def test_core_counts_two_products_a_head_and_visible_key_and_backward_five_more(kind, packing):
    window, entries = counted(kind, packing)
    if kind is LayerType.CSA:
        assert entries.max() > TINY.index_topk  # so that the limit matters
        entries = np.minimum(entries, TINY.index_topk)
    keys = window + int(entries.sum())
    cost = core_cost(TINY, kind, documents_of(packing))
    assert cost.visible_keys == keys
    assert cost.operations == 2 * 2 * TINY.num_attention_heads * TINY.head_dim * keys
    both = core_cost(TINY, kind, documents_of(packing), backward=True)
    assert (both.operations, both.visible_keys) == (3.5 * cost.operations, cost.visible_keys)


@every_packing
def test_indexer_scores_every_visible_entry_however_few_are_selected(packing):
    _, entries = counted(LayerType.CSA, packing)
    cost = indexer_cost(TINY, documents_of(packing))
    assert cost.visible_keys == entries.sum()
    dot_products, weighted_sum = 2 * TINY.index_n_heads * TINY.index_head_dim, 2 * TINY.index_n_heads
    assert cost.operations == (dot_products + weighted_sum) * entries.sum()
    assert indexer_cost(TINY, documents_of(packing), backward=True) == cost  # selection has no gradient


@pytest.mark.parametrize("packing", ["unpacked", "packed"])
@pytest.mark.parametrize("config", [TINY, FLASH], ids=["tiny", "flash"])
@every_layer
def test_projections_are_the_layers_own_kernels(kind, config, packing):
    """A kernel takes two operations a token and element, three times as many with the backward pass if it learns."""
    documents, sizes = documents_of(packing), kernels(config, kind)
    untrained = sum(size for name, size in sizes.items() if name.startswith("compressor.indexer."))
    assert (untrained > 0) == (kind is LayerType.CSA)
    trained = sum(sizes.values()) - untrained
    for backward, factor in ((False, 1), (True, 3)):
        rest = core_cost(config, kind, documents, backward=backward)
        if kind is LayerType.CSA:
            rest += indexer_cost(config, documents)
        cost = layer_cost(config, kind, documents, backward=backward)
        assert cost.operations - rest.operations == 2 * BATCH * LENGTH * (factor * trained + untrained)
        assert cost.visible_keys == rest.visible_keys


@every_layer
def test_padding_is_no_work(kind):
    """As the module says: the same document alone and with as much padding behind it takes the same operations."""
    alone, followed = Documents.unpacked(1, 64), Documents.from_lengths(np.array([64]), 128)
    for backward in (False, True):
        one, other = (layer_cost(TINY, kind, documents, backward=backward) for documents in (alone, followed))
        assert (one.operations, one.visible_keys) == (other.operations, other.visible_keys)


@pytest.mark.parametrize("element", [2, 4])
def test_bytes_of_the_core_are_every_operand_and_result_once(element):
    q = BATCH * LENGTH * TINY.num_attention_heads * TINY.head_dim
    keys = BATCH * (LENGTH + LENGTH // TINY.hca_ratio) * TINY.head_dim
    documents = documents_of("packed")
    forward = core_cost(TINY, LayerType.HCA, documents, bytes_per_element=element)
    both = core_cost(TINY, LayerType.HCA, documents, bytes_per_element=element, backward=True)
    assert forward.bytes == element * (2 * q + keys)  # q and keys read, the output written
    # q, output, its gradient and keys read; gradients of q and keys written
    assert both.bytes - forward.bytes == element * (3 * q + keys + q + keys)


def test_bytes_of_a_layer_grow_by_its_weights_and_hidden_states():
    documents = documents_of("unpacked")
    core, layer = (cost(TINY, LayerType.HCA, documents) for cost in (core_cost, layer_cost))
    hidden = 2 * BATCH * LENGTH * TINY.hidden_size
    assert layer.bytes - core.bytes == 4 * (sum(kernels(TINY, LayerType.HCA).values()) + hidden)


def test_costs_add_up_field_by_field():
    assert Cost(1, 20, 300) + Cost(4, 50, 600) == Cost(5, 70, 900)


# --- The released sizes, at a million tokens --------------------------------------------------------------------------

MILLION = 2**20


def last_query(cost, *arguments) -> Cost:
    """What the query that has seen a million tokens, itself included, adds to a row without it."""
    longer, shorter = (cost(*arguments, Documents.unpacked(1, length)) for length in (MILLION, MILLION - 1))
    return Cost(*(getattr(longer, f) - getattr(shorter, f) for f in ("operations", "bytes", "visible_keys")))


def test_a_query_of_hca_at_a_million_tokens_takes_a_gigaflop():
    cost = last_query(core_cost, FLASH, LayerType.HCA)
    assert cost.visible_keys == 128 + MILLION // 128
    assert cost.operations == 4 * 64 * 512 * (128 + MILLION // 128)
    assert cost.operations == pytest.approx(1.09e9, rel=1e-3)


def test_a_query_of_csa_at_a_million_tokens_sees_640_keys_and_scores_a_quarter_million():
    assert last_query(core_cost, FLASH, LayerType.CSA).operations == 4 * 64 * 512 * (128 + 512)
    cost = last_query(indexer_cost, FLASH)
    assert cost.visible_keys == MILLION // 4
    assert cost.operations - 2 * 64 * cost.visible_keys == 2 * 64 * 128 * MILLION // 4  # less the weighted sum


def test_a_million_tokens_do_not_overflow():
    """The queries of one row see more than 2^31 keys together."""
    cost = core_cost(FLASH, LayerType.HCA, Documents.unpacked(1, MILLION), backward=True)
    window = 128 * MILLION - 128 * 127 // 2
    entries = 128 * sum(range(MILLION // 128)) + MILLION // 128  # the last query of each window is the first to see it
    assert cost.visible_keys == window + entries
    assert cost.operations == 14 * 64 * 512 * (window + entries)
    assert cost.visible_keys > 2**31
