"""Page tables, block hashes, immediates, layouts and the shard plan."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kvferry_proto import immediate, page_table
from kvferry_proto.hashing import block_hashes
from kvferry_proto.ints import Int32s
from kvferry_proto.layout import DTYPE_BYTES, KVLayout
from kvferry_proto.page_table import PageEntry, Source
from kvferry_proto.shards import arrivals_per_page, plan

entries = st.builds(PageEntry, st.integers(-(2**63), 2**63 - 1), st.sampled_from(Source))
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=80)


def layout(kv_heads: int, ranks: int, **fields: object) -> KVLayout:
    base = {"model": "m", "dtype": "float32", "layers": 2, "head_dim": 4, "page_size": 8}
    return KVLayout(**(base | {"kv_heads": kv_heads, "ranks": ranks} | fields))


# --- page table -----------------------------------------------------------------------------------------------------


@given(st.lists(entries, max_size=50))
def test_page_table_round_trip(pages):
    table = page_table.pack(pages)
    assert len(table) == page_table.ENTRY_INTS * len(pages)
    assert page_table.unpack(Int32s.from_frame(table.to_frame())) == pages


@given(st.lists(entries, max_size=5), st.integers(1, page_table.ENTRY_INTS - 1))
def test_torn_page_table_is_refused(pages, extra):
    table = page_table.pack(pages)
    table.extend([0] * extra)
    with pytest.raises(ValueError, match="numbers per page"):
        page_table.unpack(table)


@given(st.integers(-(2**31), 2**31 - 1).filter(lambda number: number not in set(Source)))
def test_unknown_source_is_refused(source):
    with pytest.raises(ValueError, match="Source"):
        page_table.unpack(Int32s([1, 2, source]))


# --- block hashes ---------------------------------------------------------------------------------------------------


@given(tokens, st.integers(1, 9))
def test_one_hash_for_each_full_page(prompt, page_size):
    hashes = block_hashes(Int32s(prompt), page_size, "m")
    assert len(hashes) == len(prompt) // page_size
    assert all(-(2**63) <= number < 2**63 for number in hashes)


@given(tokens, tokens, st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(first, second, page_size):
    pair = zip(block_hashes(Int32s(first), page_size, "m"), block_hashes(Int32s(second), page_size, "m"), strict=False)
    for index, (one, other) in enumerate(pair):
        end = (index + 1) * page_size
        assert (one == other) == (first[:end] == second[:end])


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=20), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4)
)
def test_models_and_salts_never_share_pages(prompt, model, salt, other):
    assume(salt != other)
    assert block_hashes(Int32s(prompt), 4, model, salt)[0] != block_hashes(Int32s(prompt), 4, model, other)[0]
    if model:
        moved = block_hashes(Int32s(prompt), 4, model[:-1], model[-1] + salt)
        assert moved[0] != block_hashes(Int32s(prompt), 4, model, salt)[0]


def test_a_separator_inside_a_name_makes_no_two_names_equal():
    prompt = Int32s(range(4))
    assert block_hashes(prompt, 4, "a\0b", "c") != block_hashes(prompt, 4, "a", "b\0c")


@pytest.mark.parametrize("page_size", [0, -1])
def test_page_size_must_be_positive(page_size):
    with pytest.raises(ValueError, match="page size"):
        block_hashes(Int32s(range(4)), page_size, "m")


def test_hashes_are_the_same_on_every_machine():
    """Nodes of different versions compare them, so a change here is a change of protocol."""
    first = block_hashes(Int32s(range(8)), 4, "model", "salt")
    assert first == block_hashes(Int32s.from_frame(Int32s(range(8)).to_frame()), 4, "model", "salt")
    assert len(set(first)) == 2


# --- immediates -----------------------------------------------------------------------------------------------------


@given(
    st.integers(0, immediate.MAX_SLOTS - 1),
    st.integers(0, immediate.MAX_GENERATIONS - 1),
    st.integers(0, immediate.MAX_PAGES_PER_WRITE),
)
def test_immediate_round_trip(slot, generation, pages):
    value = immediate.pack(slot, generation, pages)
    assert 0 <= value < 2**32
    assert immediate.unpack(value) == (slot, generation, pages)


@given(st.integers(0, 2**32 - 1))
def test_every_32_bits_are_an_immediate(value):
    assert immediate.pack(*immediate.unpack(value)) == value


@pytest.mark.parametrize("fields", [(-1, 0, 0), (1024, 0, 0), (0, -1, 0), (0, 1024, 0), (0, 0, -1), (0, 0, 4096)])
def test_fields_that_do_not_fit_are_refused(fields):
    with pytest.raises(ValueError, match="out of range"):
        immediate.pack(*fields)


# --- layouts --------------------------------------------------------------------------------------------------------

SHARDS = [
    (heads, source, destination)
    for heads in (1, 2, 3, 4, 6, 8)
    for source, destination in itertools.product((1, 2, 3, 4, 6, 8, 12, 16), repeat=2)
    if all(not (heads % ranks and ranks % heads) for ranks in (source, destination))
]


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (2, 3), (4, 6), (8, 12)])
def test_heads_that_do_not_divide_are_refused_with_both_numbers(heads, ranks):
    with pytest.raises(ValueError, match=f"{heads} KV heads cannot be split over {ranks} ranks"):
        layout(heads, ranks)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "page_size", "ranks"])
def test_numbers_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        layout(**({"kv_heads": 2, "ranks": 1} | {field: 0}))


def test_latents_have_one_kv_head():
    with pytest.raises(ValueError, match="latents has 1 KV head, got 2"):
        layout(2, 1, latent=True)


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 600), st.sampled_from(sorted(DTYPE_BYTES)))
def test_a_latent_is_kept_once_and_by_every_rank(ranks, page_size, dim, dtype):
    it = layout(1, ranks, latent=True, head_dim=dim, page_size=page_size, dtype=dtype)
    assert it.page_bytes == it.head_bytes == page_size * dim * DTYPE_BYTES[dtype]
    assert (it.replicas, it.heads_per_rank) == (ranks, 1)
    assert 2 * it.token_bytes == layout(1, ranks, head_dim=dim, page_size=page_size, dtype=dtype).token_bytes


def test_unknown_dtype_is_refused_also_on_the_wire():
    with pytest.raises(ValueError, match="int8"):
        layout(2, 1, dtype="int8")
    wire = msgspec.to_builtins(layout(2, 1)) | {"dtype": "int8"}
    with pytest.raises(msgspec.ValidationError, match="int8"):
        msgspec.convert(wire, KVLayout)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(("heads", "ranks"), [(8, 1), (8, 2), (8, 8), (8, 16), (1, 4)])
def test_ranks_together_hold_every_head_equally_often(heads, ranks, dtype):
    it = layout(heads, ranks, dtype=dtype)
    held = [
        head for rank in range(ranks) for head in range(it.first_head(rank), it.first_head(rank) + it.heads_per_rank)
    ]
    assert sorted(held) == sorted(list(range(heads)) * it.replicas)
    whole = it.layers * 2 * heads * it.head_dim * DTYPE_BYTES[dtype]
    assert it.token_bytes * ranks == whole * it.replicas


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_pages_hold_the_tokens_and_none_is_empty(count, page_size):
    pages = layout(2, 1, page_size=page_size).pages_for(count)
    assert (pages - 1) * page_size < count <= pages * page_size or (count == 0 and pages == 0)


# --- the shard plan -------------------------------------------------------------------------------------------------


KINDS = [(*shards, False) for shards in SHARDS] + [(*shards, True) for shards in SHARDS if shards[0] == 1]


@pytest.mark.parametrize(("heads", "source_ranks", "destination_ranks", "latent"), KINDS)
def test_every_byte_of_every_destination_comes_once_from_where_it_belongs(
    heads, source_ranks, destination_ranks, latent
):
    """A page whose every byte says what it is, moved by the plan."""
    source, destination = (layout(heads, ranks, latent=latent) for ranks in (source_ranks, destination_ranks))

    def page(of: KVLayout, rank: int) -> list[tuple[int, int]]:
        first = of.first_head(rank)
        return [(head, byte) for head in range(first, first + of.heads_per_rank) for byte in range(of.head_bytes)]

    arrived: list[list[tuple[int, int] | None]] = [[None] * destination.page_bytes for _ in range(destination_ranks)]
    pieces = plan(source, destination)
    for piece in pieces:
        data = page(source, piece.source_rank)[piece.source_offset : piece.source_offset + piece.length]
        assert len(data) == piece.length > 0
        place = slice(piece.destination_offset, piece.destination_offset + piece.length)
        assert set(arrived[piece.destination_rank][place]) == {None}
        arrived[piece.destination_rank][place] = data
    assert arrived == [page(destination, rank) for rank in range(destination_ranks)]
    for rank in range(destination_ranks):
        held = range(destination.first_head(rank), destination.first_head(rank) + destination.heads_per_rank)
        # Source ranks hold the heads in blocks; every block that the destination needs comes in one write.
        assert arrivals_per_page(pieces, rank) == len({head // source.heads_per_rank for head in held})


@pytest.mark.parametrize(("heads", "source_ranks", "destination_ranks", "latent"), KINDS)
def test_replicas_share_the_writes(heads, source_ranks, destination_ranks, latent):
    source, destination = (layout(heads, ranks, latent=latent) for ranks in (source_ranks, destination_ranks))
    pieces = plan(source, destination)
    for head in range(heads):
        first = head * source.replicas // source.heads_per_rank
        holders = range(first, first + source.replicas)
        sent = [sum(piece.source_rank == holder for piece in pieces) for holder in holders]
        assert max(sent) - min(sent) <= max(1, source.heads_per_rank)


@st.composite
def layout_pairs(draw):
    """Any two shardings of any cache, and whose turn it is."""
    heads = draw(st.integers(1, 48))
    ranks = [ranks for ranks in range(1, 97) if not (heads % ranks and ranks % heads)]
    shape = {
        "head_dim": draw(st.integers(1, 256)),
        "page_size": draw(st.integers(1, 128)),
        "dtype": draw(st.sampled_from(sorted(DTYPE_BYTES))),
        "latent": heads == 1 and draw(st.booleans()),
    }
    source, destination = (layout(heads, draw(st.sampled_from(ranks)), **shape) for _ in range(2))
    return source, destination, draw(st.integers(0, 1023))


@given(layout_pairs())
def test_any_two_layouts_tile_every_destination_page_with_the_fewest_writes(pair):
    source, destination, turn = pair
    pieces = plan(source, destination, turn=turn)
    assert len(pieces) == len(plan(source, destination))
    size = source.head_bytes
    for rank in range(destination.ranks):
        of_rank = sorted(
            (piece for piece in pieces if piece.destination_rank == rank), key=lambda p: p.destination_offset
        )
        assert arrivals_per_page(pieces, rank) == len(of_rank)
        at = 0
        for piece in of_rank:
            assert piece.destination_offset == at
            assert 0 <= piece.source_offset < piece.source_offset + piece.length <= source.page_bytes
            # The same head on both sides.
            there = source.first_head(piece.source_rank) * size + piece.source_offset
            assert there == destination.first_head(rank) * size + piece.destination_offset
            at += piece.length
        assert at == destination.page_bytes
        first = destination.first_head(rank)
        blocks = {head // source.heads_per_rank for head in range(first, first + destination.heads_per_rank)}
        assert len(of_rank) == len(blocks)


@given(layout_pairs())
def test_over_the_turns_every_replica_sends_equally_often(pair):
    source, destination, turn = pair
    sent = Counter(
        piece.source_rank for step in range(source.replicas) for piece in plan(source, destination, turn=turn + step)
    )
    for first in range(0, source.ranks, source.replicas):
        assert len({sent[rank] for rank in range(first, first + source.replicas)}) == 1


@pytest.mark.parametrize(
    "change", [{"model": "x"}, {"dtype": "float16"}, {"layers": 3}, {"head_dim": 8}, {"page_size": 16}]
)
def test_pairs_that_cannot_exchange_pages_are_refused_with_both_sides_named(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name} differs: .*{value}"):
        plan(layout(4, 2), layout(4, 2, **change))
    assert layout(4, 2).mismatch(layout(4, 1)) is None


def test_latents_and_keys_and_values_do_not_mix():
    assert layout(1, 2, latent=True).mismatch(layout(1, 4)) == "latent differs: True on one side, False on the other"
