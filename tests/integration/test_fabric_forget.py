"""A receiver that is held to be gone: nothing is kept for it, and it may come back."""

import signal
from pathlib import Path

import fabric_rig as rig
import numpy as np
import pytest
from fabric_rig import schedule
from kvferry_fabric import EventKind, TransferEngine

SIZE = 1 << 20


def held() -> tuple[int, int]:
    """File descriptors of this process, and maps of receivers' memory."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return len(list(Path("/proc/self/fd").iterdir())), maps.count("kvferry-test")


@pytest.mark.parametrize("provider", ["tcp", "net", "local"])
def test_nothing_is_kept_of_a_receiver_that_stands_still(provider) -> None:
    with rig.receiver(provider, SIZE) as other, TransferEngine(provider, incarnation=1, bind=rig.BIND) as engine:
        region, pages, remote = engine.register(memoryview(bytearray(SIZE))), np.arange(5), other.descriptor
        before = held()
        for generation in (1, 2):
            other.ask(f"expect 1 {generation} 5")
            with engine.connect(remote.addresses, remote.seat) as peer:
                schedule(engine, region, remote, pages, generation=generation, peer=peer)
                assert rig.end_of(engine).kind is EventKind.DONE
            assert other.ask("wait 15") == ["ARRIVED"]
            assert held() > before, "a connection outlives its transfers"
            other.ask(f"disarm 1 {generation}")
            rig.stop(other.process)
            engine.forget(remote.addresses, remote.seat)
            rig.until(lambda: held() == before, "the connection to be closed")
            other.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("provider", ["tcp", "net"])
def test_what_is_in_flight_to_it_fails(provider) -> None:
    with rig.receiver(provider, 64 << 20) as other, TransferEngine(provider, incarnation=1, bind=rig.BIND) as engine:
        region = engine.register(memoryview(bytearray(64 << 20)))
        schedule(engine, region, other.descriptor, np.arange(1))
        assert rig.end_of(engine).kind is EventKind.DONE
        rig.stop(other.process)
        transfer = schedule(engine, region, other.descriptor, np.arange(1 << 14))
        rig.until(lambda: transfer.statistics.writes > 0, "the first write")
        engine.forget(other.descriptor.addresses)
        failed = rig.end_of(engine)
        assert (failed.kind, failed.transfer) == (EventKind.FAILED, transfer)
        assert "held to be lost" in failed.text
        assert engine.stats().in_flight_writes == 0
        other.kill()


@pytest.mark.parametrize("provider", ["tcp", "net", "local"])
def test_it_can_be_written_to_again_at_once(provider) -> None:
    """What libfabric has not closed yet of the connection that was cut is waited for: no write fails by our own cut."""
    pair, pages = rig.Pair(provider, layers=1), np.arange(5)
    there = pair.receiver.addresses, pair.receiver.seat
    for generation in range(1, 101):
        with pair.sender.connect(*there) as peer:
            chunk = pair.chunk(pages, pages, generation=generation, counter=None, first_value=0, peer=peer)
            pair.sender.schedule_layers(chunk)
        ended = rig.end_of(pair.sender)
        assert ended.kind is EventKind.DONE, ended.text
        pair.sender.forget(*there)
    pair.close()
