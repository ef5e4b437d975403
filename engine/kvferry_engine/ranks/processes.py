"""A node's rank processes, as the lead holds them.

They are forked before the service has a thread or an event loop: importing torch takes seconds in every process, and a
fork has it already. Each shares a unix socket with the lead: its pool comes through it, then the steps go; the end of
one side is a hang-up on the other. Ranks die together: one that is gone leaves the others with half a model.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvferry_fabric import SharedMemory
from kvferry_node.logs import get_logger
from kvferry_proto.layout import KVLayout

from kvferry_engine.cuda_memory import DeviceMemory
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.ranks import member, steps
from kvferry_engine.ranks.errors import RankLostError
from kvferry_engine.ranks.group import GROUP_SECONDS, GlooGroup, join
from kvferry_engine.worker_settings import WorkerSettings

_END_SECONDS = 5.0
"""How long ranks may take to end once the lead has hung up."""
_BLAME_SECONDS = 1.0
"""How long to look for a rank that has ended, when a step has failed."""


@dataclass
class RankProcess:
    """One rank that is not the lead."""

    rank: int
    pid: int
    connection: socket.socket
    status: int | None = None
    """Exit status, negative for a signal, once it has ended."""

    def ended(self) -> bool:
        """Whether the process is over."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def kill(self) -> None:
        """End the process now."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)

    def __str__(self) -> str:
        if self.status is None:
            return f"rank {self.rank} (process {self.pid})"
        how = f"by {signal.Signals(-self.status).name}" if self.status < 0 else f"with status {self.status}"
        return f"rank {self.rank} (process {self.pid}) ended {how}"


class RankProcesses:
    """Ranks 1 and up. The forward thread broadcasts, the event loop watches; the rest is for start and end."""

    def __init__(self, ranks: Sequence[RankProcess] = (), store: int = -1) -> None:
        self._ranks = list(ranks)
        self._store = store
        self._lock = threading.Lock()
        self._lost: RankLostError | None = None

    @classmethod
    def fork(cls, settings: WorkerSettings) -> Self:
        """Fork what `settings` ask for.

        They are what `check_worker` has let pass.
        """
        if settings.tp == 1:
            return cls()
        # A file that no path leads to: the ranks meet in it, and nobody else can.
        store = os.memfd_create("kvferry-ranks")
        pairs = {rank: socket.socketpair() for rank in range(1, settings.tp)}
        return cls([_fork(settings, rank, pairs, store) for rank in pairs], store)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> dict[str, int]:
        """Process of each rank but the lead's, for /state."""
        return {str(process.rank): process.pid for process in self._ranks}

    def join(self) -> GlooGroup:
        """Meet the other ranks, which are on their way. Raises RankLostError."""
        try:
            return join(self._store, 0, 1 + len(self._ranks))
        except RuntimeError as error:
            raise self.lost(error) from error

    def receive_pools(self, layout: KVLayout, pages: int, devices: Sequence[str] | None = None) -> list[KVPool]:
        """Wait until every rank has loaded its weights, and map its pool, which lies in `devices` if given.

        Raises RankLostError.
        """
        pools = []
        for index, process in enumerate(self._ranks):
            try:
                memory = _receive(process.connection, None if devices is None else devices[index])
                pools.append(KVPool(layout, pages, memory=memory))
            except OSError as error:
                raise self.lost(error) from error
            # A rank that takes no step for so long is as good as gone.
            process.connection.settimeout(GROUP_SECONDS)
        return pools

    def broadcast(self, step: steps.Step, page_size: int) -> None:
        """Have every rank begin a step. Raises RankLostError."""
        if not self._ranks:
            return
        data = steps.pack(step, page_size)
        try:
            for process in self._ranks:
                process.connection.sendall(data)
        except OSError as error:
            raise self.lost(error) from error

    async def watch(self) -> RankLostError:
        """Wait until a rank is gone, or a step has failed; say which and how. The others are ended by then."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        for process in self._ranks:
            loop.add_reader(process.connection, gone.set)  # ranks say nothing: what can be read is their end
        try:
            await gone.wait()
        finally:
            for process in self._ranks:
                loop.remove_reader(process.connection)
        return await asyncio.to_thread(self.lost)

    def lost(self, cause: BaseException | None = None) -> RankLostError:
        """Say which rank is to blame, and end all others: called when one has hung up, or a step failed by `cause`."""
        with self._lock:
            if self._lost is None:
                until = time.monotonic() + _BLAME_SECONDS
                while not (ended := [str(each) for each in self._ranks if each.ended()]) and time.monotonic() < until:
                    time.sleep(0.01)
                self._lost = RankLostError("; ".join(ended) or f"the ranks do not keep in step: {cause}")
            for process in self._ranks:
                process.kill()
            return self._lost

    def close(self) -> None:
        """Hang up, and wait until all have ended."""
        for process in self._ranks:
            process.connection.close()
        until = time.monotonic() + _END_SECONDS
        while not all(each.ended() for each in self._ranks):
            if time.monotonic() > until:
                get_logger().warning("ranks did not end by themselves", ranks=[str(each) for each in self._ranks])
                for process in self._ranks:
                    process.kill()
            time.sleep(0.01)
        self._ranks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(connection: socket.socket, device: str | None) -> SharedMemory | DeviceMemory:
    return SharedMemory.receive(connection) if device is None else DeviceMemory.receive(connection, device)


def _fork(
    settings: WorkerSettings, rank: int, pairs: dict[int, tuple[socket.socket, socket.socket]], store: int
) -> RankProcess:
    lead = os.getpid()
    ours, theirs = pairs[rank]
    pid = os.fork()
    if pid:
        theirs.close()
        return RankProcess(rank, pid, ours)
    status = 1
    try:
        member.tether(lead)
        # An end that another rank held open would never hang up.
        for end in (end for pair in pairs.values() for end in pair if end is not theirs):
            end.close()
        status = member.live(settings, rank, theirs, store)
    finally:
        # Nothing of the lead's is to be cleaned up here.
        os._exit(status)
