"""How a node notices that it stood still, by a clock that only its own waiting moves."""

import asyncio
from types import SimpleNamespace

import pytest
from kvferry_node import service
from kvferry_node.settings import NodeSettings


def stood(monkeypatch: pytest.MonkeyPatch, longest: float, delays: list[float]) -> list[float]:
    """Return the standstills that a node tells of whose waits last so many seconds longer than they should."""
    at, late, told = 0.0, iter(delays), []

    async def sleep(seconds: float) -> None:
        nonlocal at
        at += seconds + next(late)

    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: at))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(RuntimeError):  # of the coroutine, when the delays are at their end
        asyncio.run(service.watch_standstill(longest, told.append))
    return told


@pytest.mark.parametrize("heartbeat", [0.02, 0.1, 0.25, 0.5])
def test_node_that_runs_all_the_time_never_stands_still_however_short_its_lease(monkeypatch, heartbeat):
    settings = NodeSettings(lease_seconds=2 * heartbeat, heartbeat_seconds=heartbeat)
    assert stood(monkeypatch, settings.standstill_seconds, [0.0] * 50) == []


def test_node_that_stood_still_for_longer_than_its_lease_may_last_says_for_how_long(monkeypatch):
    assert stood(monkeypatch, 2.5, [0.0, 2.0, 3.0, 0.0]) == [3.25]
