"""The ranks of a node joined by torch's gloo, over the loopback interface."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store

GROUP_SECONDS = 60.0
"""How long a rank waits for the others, when they meet and in every step after that."""
_LOOPBACK = "127.0.0.1"
_c10d: Any = distributed  # has more than its type stubs know


class GlooGroup:
    """One rank's end of the group. Its calls wait for the other ranks, and let other threads run meanwhile.

    Not torch's default group, of which a process has only one. What lies on a GPU goes over the host.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, seconds: float = GROUP_SECONDS) -> None:
        """Meet the others through `store`, which nobody else may write to. Raises RuntimeError if they don't come."""
        store.set_timeout(timedelta(seconds=seconds))
        gloo = _c10d.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001  # how torch itself makes a group of devices
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
        options._timeout = timedelta(seconds=seconds)  # noqa: SLF001
        self._rank, self._ranks = rank, ranks
        self._gloo = gloo(store, rank, ranks, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add up x over the ranks, in place. Raises RuntimeError if a rank is gone or does not come in time."""
        host = x.cpu()
        self._gloo.allreduce([host]).wait()
        return x if host is x else x.copy_(host)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return x of all ranks, [ranks, *x.shape], on rank 0, None elsewhere. Raises RuntimeError as all_reduce."""
        host = x.cpu()
        if self._rank:
            self._gloo.gather([], [host], _c10d.GatherOptions()).wait()
            return None
        shares = host.new_empty((self._ranks, *x.shape))
        self._gloo.gather([list(shares)], [host], _c10d.GatherOptions()).wait()
        return shares.to(x.device)


def join(store: int, rank: int, ranks: int) -> GlooGroup:
    """Meet the others in the file that all have open as `store`; it stays in use as long as the group."""
    return GlooGroup(_c10d.FileStore(f"/proc/self/fd/{store}", ranks), rank, ranks)
