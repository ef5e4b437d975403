"""Redis: a child of our own on a private socket, keeping nothing on disk, or one that is named in the environment."""

import asyncio
import os
import shutil
import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvferry_proto.redis_url import without_password

from kvferry.cli.up.spec import ChildSpec, Stage

GRACE_SECONDS = 5.0
CONNECT_SECONDS = 2.0
DEFAULT_PORT = 6379
LONGEST_SOCKET_PATH = 107
"""What the kernel takes as the name of a Unix socket, in bytes."""


def configured_url() -> str | None:
    """Return the URL that the services would take from the environment."""
    return os.environ.get("KVFERRY_REDIS_URL") or os.environ.get("REDIS_URL") or None


def unreachable(url: str) -> str | None:
    """Try the Redis at `url`; returns why it can't be had, without the password, or None."""
    shown = without_password(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or DEFAULT_PORT
    except ValueError:
        return f"{shown} is no Redis URL"
    if parts.scheme == "unix":
        return asyncio.run(ping(Path(unquote(parts.path))))
    if parts.scheme not in {"redis", "rediss"}:
        return f"{shown} is no Redis URL"
    try:
        # A server that wants a password or TLS does not answer a plain PING; that it listens is enough.
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return f"{shown}: {error}"
    return None


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
    # One that wants a password is alive as well.
    return None if answer.startswith((b"+PONG", b"-NOAUTH")) else f"unexpected answer {answer!r}"


def _socket(folder: Path) -> Path:
    return folder / "redis.sock"
