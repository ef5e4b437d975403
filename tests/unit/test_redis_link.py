"""What is said of a Redis that does not answer: never nothing, and nothing that is this process's own doing."""

import asyncio
import re
import socket
import threading

import click.testing
import pytest
from kvferry_node.redis_link import NoAnswer, refusal, trouble, within
from kvferry_router.cli import command as router
from redis.exceptions import AuthenticationError
from text_folder import make_model_folder


async def test_a_call_that_takes_too_long_says_so():
    with pytest.raises(NoAnswer) as caught:
        async with within(0.001):
            await asyncio.Event().wait()
    assert not caught.value.ours
    assert trouble(caught.value) == ("redis does not answer", "no answer within 0.001 s")


async def test_a_loop_that_runs_late_is_named():
    caught = NoAnswer(1.0, 0.5)
    assert caught.ours
    assert "this process itself was 0.50 s late" in trouble(caught)[1]


async def test_another_timeout_stays_what_it_is():
    with pytest.raises(TimeoutError) as caught:
        async with within(60):
            raise TimeoutError
    assert not isinstance(caught.value, NoAnswer)
    assert trouble(caught.value) == ("redis is unreachable", "TimeoutError")


async def test_a_redis_that_refuses_the_password_is_not_called_unreachable():
    assert trouble(AuthenticationError("invalid password"))[0] == "redis lets nobody in"


@pytest.fixture
def locked(redis_server):
    redis_server.command("CONFIG", "SET", "requirepass", "sesame")
    return lambda user: redis_server.url.replace("//", f"//{user}@", 1) if user else redis_server.url


@pytest.mark.parametrize(
    ("user", "words"),
    [("", "Authentication required"), (":secret", "invalid username-password pair"), (":sesame", None)],
)
def test_a_password_that_is_missing_or_wrong_is_told_apart_from_a_redis_that_is_away(locked, redis_server, user, words):
    why = refusal(locked(user))
    assert (why is None) == (words is None)
    assert (words or "") in (why or "")
    assert "secret" not in (why or "")
    redis_server.stop()
    assert refusal(locked(user)) is None


def test_a_database_that_is_not_there_is_a_refusal(redis_server):
    assert "out of range" in refusal(f"{redis_server.url}?db=99")
    assert refusal(f"{redis_server.url}?db=3") is None


def answered(to: bytes, answer: bytes) -> str | None:
    """Return what `refusal` says of a Redis that gives this answer to one command, and OK to all others."""

    def serve():
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(4096):
                for command in re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)", data):
                    connection.sendall(answer if command == to else b"+OK\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        why = refusal(f"redis://:secret@127.0.0.1:{server.getsockname()[1]}/0")
        thread.join()
    return why


def test_a_server_that_quotes_the_password_does_not_have_it_printed():
    why = answered(b"AUTH", b"-ERR unknown command 'AUTH', with args beginning with: 'secret'\r\n")
    assert "***" in why
    assert "secret" not in why


@pytest.mark.parametrize(
    "word",
    [
        b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        b"-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        b"-LOADING Redis is loading the dataset in memory",
    ],
)
def test_a_redis_that_cannot_serve_for_a_while_is_waited_for(word):
    assert answered(b"PING", word + b"\r\n") is None


def test_a_user_who_may_not_ping_is_let_in(redis_server):
    redis_server.command("ACL", "SETUSER", "app", "on", ">sesame", "~*", "&*", "+@all", "-ping")
    assert refusal(redis_server.url.replace("//", "//app:sesame@", 1)) is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sec#ret@127.0.0.1:6379/0",
        "redis://:secret@127.0.0.1:port/0",
        "redis://:secret@[::1",
        "redis://:secret@127.0.0.1:1/0?socket_timeout=soon",
        "redis://:secret@127.0.0.1:1/0?colour=red",
        "unix:///redis.sock?password=secret&db=first",
    ],
)
def test_a_url_that_cannot_be_read_is_said_to_be_so_without_the_password(url, tmp_path):
    options = ["--model", str(make_model_folder(tmp_path)), "--redis-url", url]
    result = click.testing.CliRunner().invoke(router, options)
    assert result.exit_code == 2
    assert "the URL can't be read" in result.output
    assert "sec" not in result.output.replace("seconds", "")


def test_a_service_that_its_redis_lets_not_in_says_so_and_ends(locked, tmp_path):
    options = ["--model", str(make_model_folder(tmp_path)), "--redis-url", locked(":secret")]
    result = click.testing.CliRunner().invoke(router, options)
    assert result.exit_code == 2
    assert "lets nobody in: invalid username-password pair" in result.output
    assert "secret" not in result.output
