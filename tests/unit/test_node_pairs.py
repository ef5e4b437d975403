"""Which nodes can't be paired, and that it is said once, with both named."""

import msgspec
import pytest
from kvferry_node.pairs import PairWatch, why_apart
from kvferry_node.registry import pairing
from kvferry_proto.layout import KVLayout
from kvferry_proto.nodes import NodeRecord, NodeRef, Role
from structlog.testing import capture_logs

LAYOUT = KVLayout(model="m", dtype="float32", layers=2, kv_heads=4, head_dim=8, page_size=16)


def node(role, name, provider="tcp", model="served", **layout):
    return NodeRecord(
        ref=NodeRef(name, 1),
        role=role,
        endpoint="tcp://127.0.0.1:1",
        model=model,
        layout=msgspec.structs.replace(LAYOUT, **layout),
        provider=provider,
    )


PREFILLER, DECODER = node(Role.PREFILLER, "p"), node(Role.DECODER, "d")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sharding_keeps_nobody_apart(ranks):
    decoder = node(Role.DECODER, "d", ranks=ranks)
    assert why_apart(PREFILLER, decoder) is None
    assert pairing(PREFILLER) == pairing(decoder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"page_size": 8}, "page_size differs: 16 on prefiller p, 8 on decoder d"),
        ({"dtype": "bfloat16"}, "dtype differs: 'float32' on prefiller p, 'bfloat16' on decoder d"),
        ({"model": "served"}, None),
        ({"kv_heads": 2}, "kv_heads differs: 4 on prefiller p, 2 on decoder d"),
        ({"layers": 3}, "layers differs: 2 on prefiller p, 3 on decoder d"),
        ({"head_dim": 4}, "head_dim differs: 8 on prefiller p, 4 on decoder d"),
        ({"kv_heads": 1, "latent": True}, "kv_heads differs: 4 on prefiller p, 1 on decoder d"),
        ({"provider": "shm"}, "provider differs: 'tcp' on prefiller p, 'shm' on decoder d"),
    ],
    ids=str,
)
def test_what_keeps_two_apart_is_named_with_both_values_and_placement_agrees(change, why):
    decoder = node(Role.DECODER, "d", **change)
    assert why_apart(PREFILLER, decoder) == why
    assert (pairing(PREFILLER) == pairing(decoder)) is (why is None)


def test_a_warning_comes_once_a_pair_and_life():
    watch = PairWatch()
    other = node(Role.DECODER, "other", page_size=8)
    with capture_logs() as logs:
        for record in (PREFILLER, DECODER, other, node(Role.DECODER, "foreign", model="another", page_size=8)):
            watch.joined(record)
    (warning,) = logs
    assert (warning["log_level"], warning["prefiller"], warning["decoder"]) == ("warning", "p", "other")
    assert warning["why"] == "page_size differs: 16 on prefiller p, 8 on decoder other"
    with capture_logs() as logs:
        watch.left(other)
        watch.joined(node(Role.PREFILLER, "late"))
        watch.joined(other)
    assert [entry["prefiller"] for entry in logs] == ["p", "late"]
