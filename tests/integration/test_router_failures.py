"""Lost decoders, refusals, cancels, full clusters, deadlines and shutdowns, against scripted decoders."""

import asyncio
import json
import random

import msgspec
import pytest
from kvferry_proto.errors import ErrorCode, Phase, RequestError
from kvferry_proto.message import Refused, RequestFailed
from kvferry_proto.timeline import DecodeTimeline, now
from kvferry_proto.to_router import Accepted, Queued
from kvferry_proto.usage import FinishReason
from kvferry_router import closing
from router_rig import running_cluster, warm_up
from scripted import ANSWER, ScriptedDecoder, finished, speak, step
from structlog.testing import capture_logs
from text_folder import make_model_folder
from wire import Wire

pytestmark = pytest.mark.usefixtures("folder", "nothing_left")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    warm_up()
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(redis_server, folder):
    async with running_cluster(redis_server.url, folder, admission_queue=2, recovery_seconds=0.5) as cluster:
        yield cluster


@pytest.fixture
async def hasty(redis_server, folder):
    """A cluster whose router's patience is to be seen to end."""
    async with running_cluster(
        redis_server.url,
        folder,
        accept_seconds=0.5,
        cancel_seconds=0.5,
        admission_seconds=0.5,
        admission_queue=2,
    ) as cluster:
        yield cluster


@pytest.fixture
async def patient(redis_server, folder):
    """A cluster in which a request waits for a node for longer than any test lasts."""
    async with running_cluster(redis_server.url, folder, recovery_seconds=300) as cluster:
        yield cluster


def by_load(cluster, assigned=1):
    """The decoders that got something, and those that didn't."""
    used = [decoder for decoder in cluster.decoders if len(decoder.assigned) >= assigned]
    return used, [decoder for decoder in cluster.decoders if decoder not in used]


async def assigned(cluster, eventually):
    await eventually(lambda: by_load(cluster)[0])
    return by_load(cluster)[0][0]


async def streamed(cluster, tokens):
    """Wait until so many tokens have reached the router."""
    while await cluster.metric("kvferry_answer_tokens_total") < tokens:  # noqa: ASYNC110  # nothing here sets an event
        await asyncio.sleep(0.02)


async def silent(_decoder, _origin, _assign):
    """Never answer."""


def failing(code, node="", message="no", *, avoid=True):
    async def script(_decoder, origin, assign):
        error = RequestError(code=code, message=message, phase=Phase.PREFILL, node=node, avoid=avoid)
        origin.reply(RequestFailed(request_id=assign.request_id, error=error))

    return script


async def test_the_log_says_where_the_time_of_a_request_went_that_failed(cluster, eventually):
    async def script(_decoder, origin, assign):
        error = RequestError(code=ErrorCode.VERIFY_FAILED, message="no", phase=Phase.TRANSFER)
        seen = DecodeTimeline(assigned=now(), first_page=now())
        origin.reply(RequestFailed(request_id=assign.request_id, error=error, decoder=seen))

    await cluster.decoder(script=script)
    with capture_logs() as logs:
        await cluster.complete(502)
        await eventually(lambda: any(line["event"] == "a request ended early" for line in logs))
    (line,) = [line for line in logs if line["event"] == "a request ended early"]
    assert (line["code"], line["phase"], line["nodes"]) == ("verify_failed", "transfer", ["d1"])
    assert line["client_id"].startswith("cmpl-")
    assert "first_page_ms" in line["phases_ms"]


# --- another try ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_decoder_leaves_no_gap_and_no_repeat(cluster, eventually, cut, stream):
    for node_id in ("d1", "d2"):
        (await cluster.decoder(node_id)).pause_at = cut
    options = {"return_token_ids": True, "seed": 7, "prompt": "one two"}
    call = cluster.events(**options) if stream else cluster.complete(**options)
    task = asyncio.create_task(call)
    lost = await assigned(cluster, eventually)
    for decoder in cluster.decoders:
        if decoder is not lost:
            decoder.pause_at = None
    await streamed(cluster, cut)
    await lost.kill()
    answer = await task
    if stream:
        assert answer[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in answer[:-1]]
        text = "".join(choice["text"] for choice in choices)
        ids = [token for choice in choices for token in choice["token_ids"]]
    else:
        text, ids = answer["choices"][0]["text"], answer["choices"][0]["token_ids"]
    assert (text, ids) == (ANSWER, cluster.tokens())
    other = next(decoder for decoder in cluster.decoders if decoder is not lost)
    first, second = lost.assigned[0], other.assigned[0]
    assert second.tokens.tolist() == first.tokens.tolist() + cluster.tokens()[:cut]
    assert (second.answered, second.sampling.max_tokens, second.sampling.seed) == (cut, 100 - cut, 7)
    assert first.request_id != second.request_id
    assert await cluster.metric('kvferry_retries_total{reason="node_lost"}') == 1


async def test_a_whole_answer_is_whole_even_if_its_decoder_dies_before_it_says_so(cluster, eventually):
    async def mute(decoder, origin, assign):
        origin.reply(Accepted(request_id=assign.request_id))
        origin.reply(step(assign, decoder.answer))
        await asyncio.sleep(60)

    lost = await cluster.decoder("d1", mute)
    task = asyncio.create_task(cluster.complete())
    await eventually(lambda: lost.assigned)
    await streamed(cluster, len(lost.answer))
    await lost.kill()
    choice = (await task)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")


async def test_a_router_that_stood_still_goes_on_with_the_only_decoder_there_is(cluster, eventually):
    """The router was taken for lost, the decoder did nothing wrong: it isn't avoided."""
    decoder = await cluster.decoder()
    decoder.pause_at = 3
    task = asyncio.create_task(cluster.complete(return_token_ids=True))
    for attempt in (1, 2):
        await eventually(lambda attempt=attempt: len(decoder.assigned) == attempt)
        await streamed(cluster, 3)
        cluster.router.dispatcher.stood_still(9.0)
    await eventually(lambda: len(decoder.assigned) == 3)
    decoder.go.set()
    assert (await task)["choices"][0]["token_ids"] == cluster.tokens()


async def test_a_decoder_restarted_under_its_id_may_have_what_its_last_life_failed(patient, eventually):
    lost = await patient.decoder("d1")
    lost.pause_at = 4
    task = asyncio.create_task(patient.complete(return_token_ids=True))
    await streamed(patient, 4)
    await lost.kill()
    again = await patient.decoder("d1")
    assert (await task)["choices"][0]["token_ids"] == patient.tokens()
    assert again.assigned[0].answered == 4


@pytest.mark.parametrize("cut", [0, 4])
async def test_what_the_last_decoder_had_waits_for_the_next(patient, eventually, cut):
    lost = await patient.decoder("d1")
    lost.pause_at = cut
    task = asyncio.create_task(patient.events(prompt="one two", return_token_ids=True))
    await eventually(lambda: lost.assigned)
    await streamed(patient, cut)
    await lost.kill()
    await patient.until(lambda state: (state["decoders"], state["held"]["waiting"]) == (0, 1))
    # Who asks only now is told at once.
    assert (await patient.complete(503))["error"]["code"] == "no_nodes"
    again = await patient.decoder("d1")
    answer = await task
    assert answer.pop() == "[DONE]"
    assert [token for event in answer for token in json.loads(event)["choices"][0]["token_ids"]] == patient.tokens()
    assert again.assigned[0].answered == cut


async def test_when_no_decoder_comes_the_client_hears_what_became_of_its_own(cluster, eventually):
    lost = await cluster.decoder("d1")
    lost.pause_at = 4
    task = asyncio.create_task(cluster.complete(503))
    await eventually(lambda: lost.assigned)
    await lost.kill()
    error = (await task)["error"]
    assert (error["code"], error["node"]) == ("node_lost", "d1")
    assert (await cluster.state())["held"]["waiting"] == 0


async def test_nothing_is_waited_for_where_the_decoder_is_there_and_failed(patient):
    await patient.decoder("d1", failing(ErrorCode.TRANSFER_FAILED))
    assert (await patient.complete(502))["error"]["code"] == "transfer_failed"


async def test_who_leaves_while_waiting_for_a_decoder_is_let_go(patient, eventually):
    lost = await patient.decoder("d1", failing(ErrorCode.DRAINING))
    task = asyncio.create_task(patient.complete())
    await patient.until(lambda state: state["held"]["waiting"] == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(patient.idle(), 60)
    assert len(lost.assigned) == 1


async def test_without_decoders_pages_are_counted_as_they_were_last(patient):
    """A decoder that has joined again is asked before this router has seen it: of pages of a token it has too few."""
    decoder = await patient.decoder("d1")
    await patient.complete()
    await decoder.leave()
    await patient.until(lambda state: state["decoders"] == 0)
    assert patient.router.dispatcher._placing._page_size() == decoder.record.layout.page_size


@pytest.mark.parametrize("cut", [0, 4])
async def test_what_a_decoder_said_while_its_connection_was_broken_is_asked_for_again(
    redis_server, cluster, eventually, cut
):
    """The decoder can tell nobody, and drops the request; its lease goes on."""
    decoder = ScriptedDecoder(redis_server.url, "d1", cluster.tokens())
    decoder.pause_at = cut
    async with Wire(decoder.inbox.endpoint) as wire:
        decoder.registry.record = msgspec.structs.replace(decoder.record, endpoint=wire.endpoint)
        cluster.decoders.append(await decoder.start())
        await cluster.until(lambda state: state["decoders"] == 1)
        task = asyncio.create_task(cluster.complete(return_token_ids=True))
        await eventually(lambda: decoder.assigned)
        await streamed(cluster, cut)
        await wire.cut()
        decoder.go.set()
        await eventually(lambda: not decoder.running)
        await wire.mend()
        assert (await task)["choices"][0]["token_ids"] == cluster.tokens()
        first, second = decoder.assigned
        assert (second.answered, first.request_id in decoder.cancelled) == (cut, True)


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.TRANSFER_FAILED, ErrorCode.DRAINING])
async def test_what_another_node_may_do_is_tried_there(cluster, code):
    scripts = [failing(code), speak]

    async def once(decoder, origin, assign):
        await (scripts.pop(0) if len(scripts) > 1 else scripts[0])(decoder, origin, assign)

    for node_id in ("d1", "d2"):
        await cluster.decoder(node_id, once)
    record = (await cluster.complete(kvferry_timeline=True))["kvferry"]
    assert record["timeline"]["router"]["attempts"] == 2
    assert [len(decoder.assigned) for decoder in cluster.decoders] == [1, 1]


async def test_a_decoder_that_stood_still_may_have_what_it_gave_up(cluster):
    scripts = [failing(ErrorCode.NODE_LOST, avoid=False), speak]

    async def once(decoder, origin, assign):
        await scripts.pop(0)(decoder, origin, assign)

    await cluster.decoder("d1", once)
    record = (await cluster.complete(kvferry_timeline=True))["kvferry"]
    assert record["timeline"]["router"]["attempts"] == 2


async def test_the_cause_reaches_the_client_when_nobody_is_left(cluster):
    for node_id in ("d1", "d2"):
        await cluster.decoder(node_id, failing(ErrorCode.TRANSFER_FAILED, message="NIC gone"))
    error = (await cluster.complete(502))["error"]
    assert (error["message"], error["phase"], error["code"]) == ("NIC gone", "prefill", "transfer_failed")
    assert error["node"] in ("d1", "d2")


async def test_attempts_are_bounded(cluster):
    for number in range(5):
        await cluster.decoder(f"d{number}", failing(ErrorCode.TRANSFER_FAILED))
    await cluster.complete(502)
    assert sum(len(decoder.assigned) for decoder in cluster.decoders) == 3


async def test_an_error_after_the_stream_began_is_an_event(cluster):
    async def breaking(decoder, origin, assign):
        origin.reply(Accepted(request_id=assign.request_id))
        origin.reply(step(assign, decoder.answer[:3]))
        await failing(ErrorCode.VERIFY_FAILED)(decoder, origin, assign)

    await cluster.decoder("d1", breaking)
    events = await cluster.events(prompt="one", return_token_ids=True)
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "verify_failed"
    assert json.loads(events[0])["choices"][0]["token_ids"] == cluster.tokens()[:3]
    assert await cluster.metric('kvferry_requests_total{endpoint="completions",status="502"}') == 1


async def test_a_decoder_that_does_not_accept_in_time(hasty):
    await hasty.decoder("d1", silent)
    error = (await hasty.complete(504))["error"]
    assert (error["code"], error["phase"], error["node"]) == ("timeout", "assign", "d1")
    await asyncio.wait_for(hasty.idle(), 60)
    # It may have been slow only: it is told that nobody waits any more.
    decoder = hasty.decoders[0]
    assert decoder.cancelled == [decoder.assigned[0].request_id]


async def test_a_decoder_that_has_it_wait_is_not_one_that_does_not_answer(hasty, eventually):
    turn = asyncio.Event()

    async def full(decoder, origin, assign):
        origin.reply(Queued(request_id=assign.request_id))
        decoder.script = silent
        await turn.wait()
        await speak(decoder, origin, assign)

    decoder = await hasty.decoder("d1", full)
    waits = asyncio.create_task(hasty.complete())
    await eventually(lambda: decoder.assigned)
    await hasty.complete(504)  # asked later, and not patient enough: the first would be over by now
    turn.set()
    assert (await waits)["choices"][0]["text"] == ANSWER
    assert decoder.assigned[0].request_id not in decoder.cancelled


@pytest.mark.parametrize(
    ("reason", "code"), [("stale", "stale_incarnation"), ("json", "internal"), ("size", "internal")]
)
@pytest.mark.parametrize("named", [False, True])
async def test_a_refused_assign_ends_the_attempt_at_once(cluster, reason, code, named):
    async def refusing(_decoder, origin, assign):
        origin.reply(Refused(reason=reason, detail="no", about=assign.request_id if named else ""))

    await cluster.decoder("d1", refusing)
    status = 503 if reason == "stale" else 500
    error = (await cluster.complete(status))["error"]
    assert (error["code"], error["node"]) == (code, "d1")


@pytest.mark.parametrize("stale", ["accepted", "tokens", "finished"])
async def test_late_messages_are_counted_and_change_nothing(cluster, eventually, stale):
    async def twice(decoder, origin, assign):
        ghost = type(assign)(
            **{name: getattr(assign, name) for name in assign.__struct_fields__} | {"request_id": "old"}
        )
        origin.reply(
            {
                "accepted": Accepted(request_id="old"),
                "tokens": step(ghost, [50, 51]),
                "finished": finished(ghost, 0, FinishReason.STOP),
            }[stale]
        )
        await speak(decoder, origin, assign)

    await cluster.decoder("d1", twice)
    assert (await cluster.complete())["choices"][0]["text"] == ANSWER
    assert await cluster.metric(f'kvferry_late_messages_total{{type="{stale.capitalize()}"}}') == 1
    # A decoder that still draws tokens for it has not heard its Cancel.
    await eventually(lambda: cluster.decoders[0].cancelled == (["old"] if stale == "tokens" else []))


@pytest.mark.parametrize("breach", ["too many", "negative", "lost token", "no logprobs"])
async def test_a_decoder_that_breaks_the_protocol_is_not_believed(cluster, breach):
    async def wrong(decoder, origin, assign):
        origin.reply(Accepted(request_id=assign.request_id))
        if breach == "too many":
            origin.reply(step(assign, decoder.answer[:3]))
        elif breach == "negative":
            origin.reply(step(assign, [-4]))
        elif breach == "lost token":
            origin.reply(step(assign, decoder.answer[:1]))
            origin.reply(finished(assign, 2, FinishReason.LENGTH))
        else:
            message = step(assign, decoder.answer[:1])
            message.runs[0].logprobs.clear()
            origin.reply(message)

    await cluster.decoder("d1", wrong)
    options = {"logprobs": 1} if breach == "no logprobs" else {}
    error = (await cluster.complete(500, max_tokens=2, **options))["error"]
    assert (error["code"], error["node"]) == ("internal", "d1")


# --- cancels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed(cluster, eventually, cut, stream):
    decoder = await cluster.decoder()
    decoder.pause_at = cut
    task = asyncio.create_task(cluster.events(prompt="one") if stream else cluster.complete())
    await eventually(lambda: decoder.assigned)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: decoder.cancelled == [decoder.assigned[0].request_id])
    await asyncio.wait_for(cluster.idle(), 60)
    assert await cluster.metric('kvferry_requests_total{endpoint="completions",status="499"}') == 1
    assert await cluster.metric("kvferry_cancel_timeouts_total") == 0


async def test_a_cancel_that_nobody_confirms_is_let_go(hasty, eventually):
    decoder = await hasty.decoder()
    decoder.pause_at, decoder.confirm_cancels = 3, False
    task = asyncio.create_task(hasty.complete())
    await eventually(lambda: decoder.assigned)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(hasty.idle(), 60)
    assert await hasty.metric("kvferry_cancel_timeouts_total") == 1


async def test_a_cancel_that_a_broken_connection_lost_is_sent_again(redis_server, folder, eventually):
    async with running_cluster(redis_server.url, folder, cancel_seconds=300) as cluster:
        decoder = ScriptedDecoder(redis_server.url, "d1", cluster.tokens())
        decoder.pause_at, decoder.confirm_cancels = 3, False
        async with Wire(decoder.inbox.endpoint) as wire:
            decoder.registry.record = msgspec.structs.replace(decoder.record, endpoint=wire.endpoint)
            cluster.decoders.append(await decoder.start())
            await cluster.until(lambda state: state["decoders"] == 1)
            task = asyncio.create_task(cluster.complete())
            await eventually(lambda: decoder.assigned)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: decoder.cancelled)
            await wire.cut()
            decoder.confirm_cancels = True
            await wire.mend()
            await cluster.idle()


async def test_leaving_while_waiting_for_a_place(cluster):
    await cluster.decoder("d1", free_pages=0)
    task = asyncio.create_task(cluster.complete())
    await cluster.until(lambda state: state["held"]["waiting"] == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(cluster.idle(), 60)


# --- full -----------------------------------------------------------------------------------------------------------


async def test_a_full_cluster_is_waited_for_and_then_429(hasty):
    await hasty.decoder("d1", free_pages=0)
    answer = await hasty.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_place_that_comes_free_is_taken(cluster):
    decoder = await cluster.decoder("d1", free_pages=0)
    task = asyncio.create_task(cluster.complete())
    await cluster.until(lambda state: state["held"]["waiting"] == 1)
    decoder.load = type(decoder.load)(free_pages=100)
    assert (await task)["choices"][0]["text"] == ANSWER


async def test_the_line_is_bounded(hasty):
    await hasty.decoder("d1", free_pages=0)
    tasks = [asyncio.create_task(hasty.complete(429)) for _ in range(6)]
    errors = [(await task)["error"]["message"] for task in tasks]
    assert sum("wait already" in message for message in errors) == 4


async def test_a_full_line_takes_those_whose_decoder_was_lost(redis_server, folder):
    async with running_cluster(redis_server.url, folder, admission_queue=2, admission_seconds=300) as cluster:
        lost = await cluster.decoder("d1")
        lost.pause_at = 4
        tasks = [asyncio.create_task(cluster.complete(return_token_ids=True)) for _ in range(6)]
        await streamed(cluster, 6 * 4)
        other = await cluster.decoder("d2", free_pages=0)
        await lost.kill()
        await cluster.until(lambda state: state["held"]["waiting"] == 6)
        other.load = type(other.load)(free_pages=1000)
        assert [(await task)["choices"][0]["token_ids"] for task in tasks] == [cluster.tokens()] * 6


async def test_requests_in_flight_are_bounded(redis_server, folder):
    async with running_cluster(redis_server.url, folder, max_inflight=2) as cluster:
        decoder = await cluster.decoder()
        decoder.pause_at = 1
        tasks = [asyncio.create_task(cluster.complete()) for _ in range(2)]
        await cluster.until(lambda state: state["held"]["requests"] == 2)
        assert "under way" in (await cluster.complete(429))["error"]["message"]
        decoder.go.set()
        await asyncio.gather(*tasks)
        await cluster.complete()


async def test_a_deadline_ends_a_request(redis_server, folder):
    async with running_cluster(redis_server.url, folder, request_seconds=2) as cluster:
        decoder = await cluster.decoder()
        decoder.pause_at = 2
        error = (await cluster.complete(504))["error"]
        assert (error["code"], error["phase"]) == ("timeout", "decode")
        await asyncio.wait_for(cluster.idle(), 60)
        assert decoder.cancelled


async def test_an_answer_that_is_there_when_its_time_is_up_is_given(redis_server, folder, eventually, monkeypatch):
    monkeypatch.setattr(closing, "LAST_WORD_SECONDS", 300)
    async with running_cluster(redis_server.url, folder, request_seconds=2, cancel_seconds=5) as cluster:
        decoder = await cluster.decoder()
        decoder.confirm_cancels = False
        # The decoder says no word after the stop string: not even that it has finished.
        decoder.pause_at = len(decoder.answer) - 1
        choice = (await cluster.complete(stop=["answer"]))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (ANSWER.split("answer")[0], "stop")
        await eventually(lambda: decoder.cancelled)


# --- the end --------------------------------------------------------------------------------------------------------


async def test_draining_finishes_what_runs_and_takes_nothing_new(cluster):
    decoder = await cluster.decoder()
    decoder.pause_at = 2
    running = asyncio.create_task(cluster.complete())
    await cluster.until(lambda state: state["held"]["requests"] == 1)
    drained = asyncio.create_task(cluster.router.dispatcher.drain(60))
    await cluster.until(lambda state: state["draining"])
    assert (await cluster.complete(503))["error"]["code"] == "draining"
    decoder.go.set()
    assert (await running)["choices"][0]["text"] == ANSWER
    await drained


async def test_draining_has_an_end(cluster, eventually):
    decoder = await cluster.decoder()
    decoder.pause_at = 2
    running = asyncio.create_task(cluster.complete(503))
    await eventually(lambda: decoder.assigned)
    await cluster.router.dispatcher.drain(0.2)
    assert (await running)["error"]["code"] == "draining"
    await eventually(lambda: decoder.cancelled == [decoder.assigned[0].request_id])


async def test_nothing_is_held_after_many_requests_and_cancels(redis_server, folder, eventually):
    draw = random.Random(11)
    async with running_cluster(redis_server.url, folder) as cluster:
        for node_id in ("d1", "d2"):
            await cluster.decoder(node_id)
        limit = asyncio.Semaphore(24)

        async def one(number):
            async with limit:
                options = {"prompt": [50] * draw.randint(1, 60), "stop": ["answer"] if number % 5 == 0 else None}
                call = cluster.events(**options) if number % 2 else cluster.complete(**options)
                task = asyncio.create_task(call)
                if number % 3 == 0:
                    await asyncio.sleep(draw.random() * 0.05)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=number % 3 == 0)

        await asyncio.gather(*(one(number) for number in range(300)))
        await asyncio.wait_for(cluster.idle(), 60)
        assert await cluster.metric("kvferry_cancel_timeouts_total") == 0
        for decoder in cluster.decoders:
            assert not decoder.running
        # Reservations too: given back by the router, taken over with a decoder's next beat, or, where a busy machine
        # made Redis look unreachable meanwhile, run out.
        await eventually(lambda: redis_server.command("KEYS", "kvferry:held:*") == [], 15)


async def test_what_has_ended_counts_against_nobody_before_the_next_beat(redis_server, folder):
    """Requests that come and go between two beats: a prompt that is asked again goes where it was, however often."""

    async def unseen(decoder, origin, assign):
        await speak(decoder, origin, assign)
        decoder._take_admitted()

    async with running_cluster(redis_server.url, folder) as cluster:
        first, second = [await cluster.decoder(node_id, unseen) for node_id in ("d1", "d2")]
        for _ in range(12):
            await cluster.complete(prompt=[50] * 40)
            await cluster.idle()
        assert (len(first.assigned), len(second.assigned)) == (12, 0)
