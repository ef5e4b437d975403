"""docs/protocol.md names every message, every field and every error code as the code has them."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from kvferry_proto import errors, memory, to_client, to_decoder, to_prefiller, to_router
from kvferry_proto.message import RequestFailed
from kvferry_proto.nodes import Peer
from kvferry_proto.to_client import ToClient
from kvferry_proto.to_decoder import ToDecoder
from kvferry_proto.to_prefiller import ToPrefiller
from kvferry_proto.to_router import ToRouter

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
MESSAGES = sorted(
    {kind for union in (ToClient, ToDecoder, ToPrefiller, ToRouter) for kind in get_args(union)} | {RequestFailed},
    key=lambda kind: kind.__name__,
)
SHAPES = [
    Peer,
    to_prefiller.KVLayout,
    memory.MemoryDescriptor,
    memory.DomainMemory,
    memory.LocalMemory,
    to_router.SamplingParams,
    errors.RequestError,
    to_client.Usage,
    to_client.Timeline,
    to_router.ChatMessage,
    to_router.Grammar,
]


def row(name):
    found = re.findall(rf"^\| \**{name}\** \|.*$", PAGE, re.MULTILINE)
    assert len(found) == 1, f"docs/protocol.md has {len(found)} rows for {name}"
    return found[0]


@pytest.mark.parametrize("kind", [*MESSAGES, *SHAPES], ids=lambda kind: kind.__name__)
def test_every_field_is_documented(kind):
    text = row(kind.__name__)
    for field in msgspec.structs.fields(kind):
        assert f"`{field.encode_name}`" in text, f"{kind.__name__}.{field.encode_name} is missing"


def test_no_message_is_documented_that_does_not_exist():
    named = set(re.findall(r"^\| \*\*(\w+)\*\* \|", PAGE, re.MULTILINE))
    assert named == {kind.__name__ for kind in MESSAGES}


@pytest.mark.parametrize("code", errors.ErrorCode)
def test_every_error_code_is_documented_with_its_status(code):
    tried = "yes" if code in errors.RETRYABLE else "no"
    assert row(code) == f"| {code} | {errors.HTTP_STATUS[code]} | {tried} |"


def test_receivers_are_grouped_by_module():
    for module, union in (
        (to_client, ToClient),
        (to_decoder, ToDecoder),
        (to_prefiller, ToPrefiller),
        (to_router, ToRouter),
    ):
        own = {kind for kind in get_args(union) if kind.__module__ != "kvferry_proto.message"}
        assert {kind.__module__ for kind in own} == {module.__name__}
