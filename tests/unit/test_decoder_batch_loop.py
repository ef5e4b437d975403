import asyncio
from types import SimpleNamespace

import pytest
from kvferry_decoder import batch_loop
from kvferry_decoder.batch_loop import BatchLoop
from kvferry_decoder.speculation import Speculation
from kvferry_engine.worker_metrics import WorkerMetrics
from prometheus_client import CollectorRegistry


class Rig:
    """A loop whose one step ends when the test says so."""

    def __init__(self, monkeypatch):
        self.admitted = 0
        self.step_ends = asyncio.Event()
        self.plans = [["slice"], []]
        monkeypatch.setattr(batch_loop.step, "plan", lambda _, **__: SimpleNamespace(matchers=[]))
        scheduler = SimpleNamespace(
            plan_step=lambda: self.plans.pop(0), give_up_step=lambda _: self.plans.clear(), speculation=Speculation()
        )
        worker = SimpleNamespace(config=SimpleNamespace(vocab_size=8), compute=self.compute)
        self.loop = BatchLoop(
            worker,
            scheduler,
            WorkerMetrics(CollectorRegistry(), lambda: None),
            admit=self.admit,
            on_drawn=lambda _: None,
            on_broken=lambda *_: None,
            on_refused=lambda *_: None,
        )

    def admit(self):
        self.admitted += 1

    async def compute(self, _):
        await self.step_ends.wait()


@pytest.fixture
async def rig(monkeypatch):
    rig = Rig(monkeypatch)
    running = asyncio.ensure_future(rig.loop.run())
    await asyncio.sleep(0)
    yield rig
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    rig.loop.close()


async def test_whoever_comes_during_a_step_is_admitted_before_its_end(rig):
    assert rig.admitted == 1
    for _ in range(5):
        rig.loop.wake()
    await asyncio.sleep(0)
    assert rig.admitted == 2, "five messages in one turn are looked at once"


async def test_nobody_is_admitted_after_the_loop_has_ended(monkeypatch):
    rig = Rig(monkeypatch)
    running = asyncio.ensure_future(rig.loop.run())
    await asyncio.sleep(0)
    rig.loop.wake()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    rig.loop.wake()
    await asyncio.sleep(0)
    rig.loop.close()
    assert rig.admitted <= 2
    seen = rig.admitted
    rig.loop.wake()
    await asyncio.sleep(0)
    assert rig.admitted == seen
