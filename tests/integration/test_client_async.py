"""The asyncio client against a scripted router on a real socket."""

import asyncio
import gc

import pytest
import uvloop
from kvferry import AsyncClient, errors
from kvferry.testing import ScriptedRouter
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.ints import Int32s
from kvferry_proto.to_client import Delta, Failed
from kvferry_proto.to_router import CancelGenerate, Generate


async def expect(router, kind):
    return await asyncio.to_thread(router.expect, kind)


def hold(_request, _reply):
    """Never answer."""


def first_piece(request, reply):
    reply.send(Delta(id=request.id, text="one", token_ids=Int32s([1])))


async def test_stream_gives_pieces_and_then_the_whole():
    with ScriptedRouter() as router:
        async with AsyncClient(router.endpoint) as client, await client.stream("a b c") as stream:
            assert [piece.text async for piece in stream] == ["a", "b", "c"]
            assert stream.completion.token_ids == [0, 1, 2]


async def test_two_hundred_requests_at_once_over_one_socket():
    with ScriptedRouter() as router:
        async with AsyncClient(router.endpoint) as client:
            answers = await asyncio.gather(*(client.generate(f"{i} x") for i in range(200)))
            assert [answer.text for answer in answers] == [f"{i}x" for i in range(200)]
            assert len(client.exchange) == 0


async def test_cancelling_the_task_cancels_the_request():
    with ScriptedRouter(hold) as router:
        async with AsyncClient(router.endpoint) as client:
            task = asyncio.create_task(client.generate("x"))
            asked = await expect(router, Generate)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await expect(router, CancelGenerate)).id == asked.id
            assert len(client.exchange) == 0


@pytest.mark.parametrize("leave", ["break", "close"])
async def test_leaving_a_stream_early_cancels_it(leave):
    with ScriptedRouter(first_piece) as router:
        async with AsyncClient(router.endpoint) as client:
            stream = await client.stream("x")
            async for _ in stream:
                break
            if leave == "close":
                stream.close()
            else:
                del stream
                gc.collect()
            asked = await expect(router, Generate)
            assert (await expect(router, CancelGenerate)).id == asked.id


async def test_cancel_ends_the_stream_once_the_router_says_so():
    replies = []

    def script(request, reply):
        replies.append(reply)
        first_piece(request, reply)

    error = RequestError(code=ErrorCode.CANCELLED, message="stopped", phase=Phase.DECODE, node="decoder-1")
    with ScriptedRouter(script) as router:
        async with AsyncClient(router.endpoint) as client:
            stream = await client.stream("x")
            assert (await anext(stream)).text == "one"
            stream.cancel()
            await expect(router, Generate)
            asked = await expect(router, CancelGenerate)
            replies[0].send(Failed(id=asked.id, error=error))
            with pytest.raises(errors.Cancelled):
                await anext(stream)


async def test_a_timeout_cancels_and_names_the_phase():
    with ScriptedRouter(hold) as router:
        async with AsyncClient(router.endpoint) as client:
            with pytest.raises(errors.RequestTimeout) as caught:
                await client.generate("x", timeout=0.1)
            asked = await expect(router, Generate)
            assert (await expect(router, CancelGenerate)).id == asked.id
    assert caught.value.phase is Phase.ROUTE


async def test_nobody_there_is_told_within_the_connect_timeout():
    async with AsyncClient("tcp://127.0.0.1:1", connect_timeout=0.2) as client:
        with pytest.raises(errors.ConnectionLost):
            await client.generate("x")


async def test_a_router_that_restarts_fails_what_is_open_and_serves_what_comes_next():
    router = ScriptedRouter(hold)
    async with AsyncClient(router.endpoint) as client:
        open_ones = [asyncio.create_task(client.generate("x")) for _ in range(10)]
        for _ in open_ones:
            await expect(router, Generate)
        await asyncio.to_thread(router.close)
        results = await asyncio.gather(*open_ones, return_exceptions=True)
        assert [type(result) for result in results] == [errors.ConnectionLost] * 10
        waiting = asyncio.create_task(client.generate("a b"))
        await asyncio.sleep(0.1)
        with ScriptedRouter(endpoint=router.endpoint) as successor:
            assert (await waiting).text == "ab"
            assert (await expect(successor, Generate)).prompt == "a b"


async def test_closing_fails_what_is_open():
    with ScriptedRouter(hold) as router:
        client = AsyncClient(router.endpoint)
        task = asyncio.create_task(client.generate("x"))
        asked = await expect(router, Generate)
        await client.close()
        with pytest.raises(errors.ConnectionLost, match="closed"):
            await task
        assert (await expect(router, CancelGenerate)).id == asked.id
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("y")


async def test_a_wrong_request_is_refused_before_it_is_sent():
    with ScriptedRouter() as router:
        async with AsyncClient(router.endpoint) as client:
            with pytest.raises(errors.BadRequest, match="exactly one"):
                await client.generate()


def test_uvloop_is_as_good_a_loop():
    async def ask(endpoint):
        async with AsyncClient(endpoint) as client:
            answers = await asyncio.gather(*(client.generate(f"{i} x") for i in range(100)))
            return [answer.text for answer in answers]

    with ScriptedRouter() as router:
        assert uvloop.run(ask(router.endpoint)) == [f"{i}x" for i in range(100)]
