"""The router's guess at who holds a prompt's beginning."""

from hypothesis import given
from hypothesis import strategies as st
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRef
from kvferry_router.prefix_memory import HOLDERS, PrefixMemory

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=4, page_size=4)
ALICE, BOB = NodeRef("alice", 1), NodeRef("bob", 1)


def memory_of(*notes, blocks=100):
    memory = PrefixMemory(blocks)
    for node, tokens in notes:
        memory.note(node, LAYOUT, tokens, "")
    return memory


def test_the_longest_common_beginning_counts_in_whole_pages():
    memory = memory_of((ALICE, range(13)), (BOB, [*range(4), *range(90, 99)]))
    assert memory.held(LAYOUT, range(20), "") == {"alice": 12, "bob": 4}
    assert memory.held(LAYOUT, range(1, 20), "") == {}


def test_salts_and_models_are_apart():
    memory = memory_of((ALICE, range(8)))
    assert memory.held(LAYOUT, range(8), "other") == {}


def test_a_node_that_is_gone_has_nothing_and_its_next_life_neither():
    memory = memory_of((ALICE, range(8)), (BOB, range(4)))
    memory.forget(ALICE)
    assert memory.held(LAYOUT, range(8), "") == {"bob": 4}
    assert len(memory) == 1


def test_what_was_not_seen_for_longest_goes_first_from_its_end():
    memory = memory_of((ALICE, range(8)), (ALICE, range(50, 58)), (ALICE, range(4)), blocks=3)
    assert memory.held(LAYOUT, range(50, 58), "") == {"alice": 8}
    assert memory.held(LAYOUT, range(8), "") == {"alice": 4}


def test_a_block_that_everybody_has_is_remembered_of_the_last_few():
    nodes = [NodeRef(f"n{number}", 1) for number in range(HOLDERS + 3)]
    memory = memory_of(*((node, range(4)) for node in nodes))
    assert set(memory.held(LAYOUT, range(4), "")) == {node.id for node in nodes[-HOLDERS:]}


@given(st.lists(st.tuples(st.sampled_from([ALICE, BOB]), st.lists(st.integers(0, 1), max_size=14)), max_size=12))
def test_it_is_bounded_and_never_says_more_than_was_noted(notes):
    memory = memory_of(*notes, blocks=5)
    assert len(memory) <= 5
    for _, asked in notes:
        for name, tokens in memory.held(LAYOUT, asked, "").items():
            told = [tokens_of_note for node, tokens_of_note in notes if node.id == name]
            assert any(len(each) >= tokens and each[:tokens] == asked[:tokens] for each in told)
