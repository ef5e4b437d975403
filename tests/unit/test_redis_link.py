"""What is said of a Redis that does not answer: never nothing, and nothing that is this process's own doing."""

import asyncio
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


def test_a_server_that_quotes_the_password_does_not_have_it_printed():
    def answer():
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"-ERR unknown command 'AUTH', with args beginning with: 'secret'\r\n")
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        why = refusal(f"redis://:secret@127.0.0.1:{server.getsockname()[1]}/0")
        thread.join()
    assert "***" in why
    assert "secret" not in why


def test_a_service_that_its_redis_lets_not_in_says_so_and_ends(locked, tmp_path):
    options = ["--model", str(make_model_folder(tmp_path)), "--redis-url", locked(":secret")]
    result = click.testing.CliRunner().invoke(router, options)
    assert result.exit_code == 2
    assert "lets nobody in: invalid username-password pair" in result.output
    assert "secret" not in result.output
