"""A wire to a socket that can be cut, and mended: what is under way on it is lost, and both ends live on."""

import asyncio
import contextlib

from cluster import free_port


class Wire:
    """Carries TCP connections to an endpoint of ZeroMQ. Use as an async context manager."""

    def __init__(self, target):
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host.strip("[]").removeprefix("::ffff:"), int(port)
        self._port = free_port()
        self._server = None
        self._ends = set()
        self._carrying = set()
        self.endpoint = f"tcp://127.0.0.1:{self._port}"

    async def __aenter__(self):
        await self.mend()
        return self

    async def __aexit__(self, *_):
        await self.cut()

    async def mend(self):
        """Take connections, from now on."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)

    async def cut(self):
        """Break every connection, and take none until it is mended."""
        self._server.close()
        for writer in list(self._ends):
            writer.transport.abort()
        if self._carrying:
            await asyncio.wait(self._carrying)

    async def _connect(self, reader, writer):
        self._ends.add(writer)
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(*self._target)
            self._ends.add(back)
            for source, sink in ((reader, back), (there, writer)):
                task = asyncio.create_task(self._carry(source, sink))
                self._carrying.add(task)
                task.add_done_callback(self._carrying.discard)

    async def _carry(self, source, sink):
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
        self._ends.discard(sink)
        sink.transport.abort()
