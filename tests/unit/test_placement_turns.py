"""Placement while Redis answers nothing: who stands in line for a connection doesn't wait for it one by one."""

import asyncio
from types import SimpleNamespace

from kvferry_node import placement
from kvferry_node.metrics import NodeMetrics
from kvferry_node.placement import Placement, Placer
from kvferry_proto.nodes import NodeRef


async def test_reservations_given_back_to_a_redis_that_is_gone_wait_for_it_once(monkeypatch):
    monkeypatch.setattr(placement, "_TIMEOUT_SECONDS", 0.01)
    callers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _reader, writer: callers.append(writer), "127.0.0.1", 0)
    view, metrics = SimpleNamespace(available=True, nodes={}), NodeMetrics()
    placer = Placer(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}", "test", view, metrics)

    def failed(error: BaseException) -> None:
        errors.append(error)
        view.available = False  # the view has noticed as well

    errors: list[BaseException] = []
    monkeypatch.setattr(placer, "_failed", failed)
    node = SimpleNamespace(ref=NodeRef("d", 1))
    placed = [Placement(request_id=f"r{number}", decoder=node, prefiller=None) for number in range(40)]
    try:
        await asyncio.gather(*(placer.release(each) for each in placed))
    finally:
        await placer.close()
        for caller in callers:
            caller.close()
        silent.close()
        await silent.wait_closed()
    assert 0 < len(errors) <= placement._CONNECTIONS
