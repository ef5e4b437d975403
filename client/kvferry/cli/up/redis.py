"""A Redis of our own: a child on a private socket, keeping nothing on disk."""

import asyncio
import shutil
from pathlib import Path

from kvferry.cli.up.spec import ChildSpec, Stage

GRACE_SECONDS = 5.0
LONGEST_SOCKET_PATH = 107
"""What the kernel takes as the name of a Unix socket, in bytes."""


def socket_url(folder: Path) -> str:
    """Return the URL of the Redis whose files are in `folder`."""
    return f"unix://{_socket(folder)}"


def redis_spec(folder: Path) -> ChildSpec:
    """Describe the child. Raises FileNotFoundError without a redis-server, ValueError for too long a folder name."""
    binary = shutil.which("redis-server")
    if binary is None:
        msg = "redis-server is not installed: apt-get install redis-server, or set REDIS_URL to a running one"
        raise FileNotFoundError(msg)
    path = _socket(folder)
    if len(bytes(path)) > LONGEST_SOCKET_PATH:
        msg = f"the temporary folder's name is too long for a socket: {folder}; set TMPDIR to a shorter one"
        raise ValueError(msg)
    argv = [binary, "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--dir", str(folder)]
    argv += ["--save", "", "--appendonly", "no", "--daemonize", "no"]

    async def probe() -> str | None:
        return await ping(path)

    return ChildSpec(name="redis", stage=Stage.REDIS, argv=argv, probe=probe, grace=GRACE_SECONDS)


async def ping(path: Path) -> str | None:
    """Ask the Redis behind a socket for a sign of life; returns why there is none, or None."""
    try:
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"PING\r\n")
            answer = await reader.readline()
    except (OSError, TimeoutError) as error:
        return f"no answer on {path}: {error}"
    writer.close()
    await writer.wait_closed()
    return None if answer.startswith(b"+PONG") else f"unexpected answer {answer!r}"


def _socket(folder: Path) -> Path:
    return folder / "redis.sock"
