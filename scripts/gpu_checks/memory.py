"""A GPU's memory is handed to another process, which maps it; what either writes, the other reads."""

import multiprocessing
import socket

import torch
from kvferry_engine.cuda_memory import DeviceMemory

from gpu_checks import DEVICE, must

SIZE = (5 << 20) + 4096
"""Bytes; no multiple of the driver's pieces."""


def _other(connection: socket.socket) -> None:
    with DeviceMemory.receive(connection, DEVICE) as memory:
        total = int(memory.tensor.long().sum())
        memory.tensor.fill_(7)
        torch.cuda.synchronize(DEVICE)
        connection.sendall(total.to_bytes(8, "big"))
        connection.recv(1)


def run() -> str:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with DeviceMemory.create(SIZE, DEVICE) as memory:
        must(not memory.tensor.any(), "new memory is not zero")
        memory.tensor.random_(0, 256)
        total = int(memory.tensor.long().sum())
        process = multiprocessing.get_context("spawn").Process(target=_other, args=(theirs,))
        process.start()
        theirs.close()
        memory.send(ours)
        read = int.from_bytes(ours.recv(8, socket.MSG_WAITALL), "big")
        written = bool((memory.tensor == 7).all())
        ours.close()
        process.join(30)
        must(read == total, f"the other process read a sum of {read}, not {total}")
        must(written, "what the other process wrote is not here")
        must(process.exitcode == 0, f"the other process ended with status {process.exitcode}")
        dma_buf = memory.range().dma_buf
        return f"{SIZE} bytes mapped as {memory.mapped}; dma-buf: {'none' if dma_buf is None else 'yes'}"
