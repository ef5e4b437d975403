"""Client library of kvferry: ask a running cluster over ZeroMQ, one answer at a time or many at once.

    from kvferry import Client

    with Client() as client:
        print(client.generate("The ferry leaves at", max_tokens=20, temperature=0).text)

Needs pyzmq, msgspec and orjson alone.
"""

from kvferry_proto.grammar import Grammar

from kvferry import errors
from kvferry.aio import AsyncClient, AsyncStream
from kvferry.answer import Completion, Delta
from kvferry.ask import Ask
from kvferry.client import Client, Stream
from kvferry.errors import KvferryClientError
from kvferry.link import DEFAULT_ENDPOINT, CurveKeys

__all__ = [
    "DEFAULT_ENDPOINT",
    "Ask",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "CurveKeys",
    "Delta",
    "Grammar",
    "KvferryClientError",
    "Stream",
    "errors",
]
