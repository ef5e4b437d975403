"""NIXL over UCX: descriptor lists prepared once, one notification a batch, no progress thread (it spins)."""

import importlib
import time
from typing import Any

import numpy as np

from peers.work import NAP, PATIENCE, Memory, Pages, TransferFailedError, Work


def _agent(name: str) -> Any:  # noqa: ANN401 - NIXL has no types
    for package in ("nixl_cu12", "nixl", "nixl_cu13"):
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    raise ModuleNotFoundError("no NIXL package")


def _pages(work: Work, address: int) -> np.ndarray:
    """Every page: address, length, device."""
    pages = np.zeros((work.pages, 3), np.uint64)
    pages[:, 0] = address + np.arange(work.pages, dtype=np.uint64) * np.uint64(work.page)
    pages[:, 1] = work.page
    return pages


class NixlReceiver:
    """Counts notifications."""

    def __init__(self, work: Work, _: str) -> None:
        self.agent = _agent("receiver")
        self.memory = Memory(work.size)
        self.agent.register_memory([(self.memory.address, work.size, 0, "")], mem_type="DRAM")
        self.card = (self.agent.get_agent_metadata(), self.memory.address)

    def meet(self, sender: bytes) -> None:
        self.agent.add_remote_agent(sender)

    def arm(self, round_number: int) -> None:
        """A notification needs no arming."""

    def wait(self, batches: int) -> int:
        got, end = 0, time.monotonic() + PATIENCE
        while True:
            got += sum(len(notes) for notes in self.agent.get_new_notifs().values())
            if got >= batches:
                return time.monotonic_ns()
            if time.monotonic() > end:
                raise TimeoutError(f"{got} of {batches} notifications")
            time.sleep(NAP)


class NixlSender:
    """Posts prepared writes."""

    def __init__(self, work: Work, _: str) -> None:
        self.work = work
        self.agent = _agent("sender")
        self.memory = Memory(work.size).fill()
        self.agent.register_memory([(self.memory.address, work.size, 0, "")], mem_type="DRAM")
        self.card = self.agent.get_agent_metadata()
        self.source: Pages = work.order("source")
        self.target: Pages = work.order("target")

    def meet(self, receiver: tuple[bytes, int]) -> None:
        name = self.agent.add_remote_agent(receiver[0])
        peer = name.decode() if isinstance(name, bytes) else name
        self.agent.make_connection(peer)
        mine, theirs = _pages(self.work, self.memory.address), _pages(self.work, receiver[1])
        self.mine = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, mem_type="DRAM")
        self.theirs = self.agent.prep_xfer_dlist(peer, theirs, mem_type="DRAM")

    def post(self, batch: int, round_number: int) -> tuple[Any, str]:
        part, note = self.work.part(batch), b"%d %d" % (round_number, batch)
        handle = self.agent.make_prepped_xfer(
            "WRITE", self.mine, self.source[part], self.theirs, self.target[part], note
        )
        return handle, self.agent.transfer(handle)

    def finish(self, handle: tuple[Any, str]) -> None:
        transfer, state = handle
        while state == "PROC":
            state = self.agent.check_xfer_state(transfer)
            if state == "PROC":
                time.sleep(NAP)
        if state == "ERR":
            raise TransferFailedError("NIXL says ERR")
        self.agent.release_xfer_handle(transfer)

    def progress(self) -> None:
        self.agent.get_new_notifs()
