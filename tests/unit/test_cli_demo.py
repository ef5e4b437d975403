"""The demonstration request and the table of its time line."""

import io

import httpx
import msgspec
import orjson
import pytest
from kvferry.cli.timeline import rows, table
from kvferry.cli.up.demo import PROMPT, DemoError, demo
from kvferry_proto.timeline import Chunk, DecodeTimeline, PrefillTimeline, RouterTimeline, Timeline, summary_ms
from kvferry_proto.usage import Usage
from rich.console import Console

MS = 1_000_000
TIMELINE = Timeline(
    router=RouterTimeline(
        clock="c", received=100 * MS, placed=101 * MS, accepted=103 * MS, first_token=180 * MS, finished=500 * MS
    ),
    decoder=DecodeTimeline(
        clock="c", assigned=102 * MS, reserved=103 * MS, first_page=120 * MS, last_page=161 * MS, joined=162 * MS
    ),
    prefiller=PrefillTimeline(
        clock="c", received=104 * MS, chunks=[Chunk(105 * MS, 130 * MS, 512), Chunk(131 * MS, 158 * MS, 88)],
        last_layer=158 * MS, last_write=160 * MS, pages=1140, bytes=45 << 20, writes=60,
    ),
)  # fmt: skip


def printed(renderable, width=100):
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_every_phase_has_its_row_in_order():
    found = rows(TIMELINE, summary_ms(TIMELINE))
    assert found == [
        (0.0, 5.0, "queued, until a forward pass took the request up"),
        (5.0, 25.0, "prefill chunk 1: 512 tokens"),
        (31.0, 27.0, "prefill chunk 2: 88 tokens"),
        (61.0, None, "last page arrived at the decoder"),
        (62.0, None, "joined the decode batch"),
        (80.0, None, "first token at the router"),
        (400.0, None, "answer complete"),
        (None, 2.0, "of the transfer was not hidden behind compute"),
    ]


def test_the_table_says_what_moved():
    text = printed(table(TIMELINE, Usage(prompt_tokens=601, completion_tokens=20)))
    assert "1140 page arrivals, 45.0 MiB, 60 writes" in text
    assert "601 prompt tokens, 20 answered" in text


def test_the_table_says_what_was_guessed():
    guessing = msgspec.structs.replace(TIMELINE.decoder, drafted=12, accepted=7)
    text = printed(table(msgspec.structs.replace(TIMELINE, decoder=guessing)))
    assert "7 of 12 drafts were right" in text
    assert "drafts" not in printed(table(TIMELINE))


def test_a_request_without_a_prefiller_says_so():
    alone = Timeline(router=TIMELINE.router, decoder=TIMELINE.decoder, prefiller=None)
    assert "the decoder prefilled by itself" in printed(table(alone))


def event(**fields):
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def words(*pieces):
    return b"".join(event(choices=[{"delta": {"content": piece}}]) for piece in pieces)


RECORD = {"timeline": msgspec.to_builtins(TIMELINE), "phases_ms": {}}
END = event(choices=[], usage={"prompt_tokens": 601, "completion_tokens": 2}, kvferry=RECORD) + b"data: [DONE]\n\n"


async def ask(stream, status=200, models=({"id": "m"},)):
    bodies = []

    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": list(models)})
        bodies.append(orjson.loads(request.content))
        return httpx.Response(status, content=stream)

    out = io.StringIO()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        await demo(client, "http://x", Console(file=out, width=100), PROMPT)
    return out.getvalue(), bodies


async def test_the_answer_is_streamed_and_its_time_line_shown():
    text, bodies = await ask(words("It is ", "[electric].") + END)
    assert "It is [electric]." in text
    assert "prefill chunk 2: 88 tokens" in text
    assert bodies[0]["model"] == "m"
    assert bodies[0]["stream"] is True
    assert bodies[0]["kvferry_timeline"] is True
    assert len(bodies[0]["messages"][0]["content"].split()) > 200


@pytest.mark.parametrize(
    ("stream", "status", "models", "words_of_error"),
    [
        (words("It") + event(error={"message": "decoder-1 is gone"}), 200, [{"id": "m"}], "decoder-1 is gone"),
        (b'{"error": {"message": "busy"}}', 429, [{"id": "m"}], "429.*busy"),
        (END, 200, [{"id": "m"}], "empty"),
        (END, 200, [], "names no model"),
    ],
)
async def test_an_answer_that_fails_is_a_failure(stream, status, models, words_of_error):
    with pytest.raises(DemoError, match=words_of_error):
        await ask(stream, status, models)


async def test_no_time_line_is_said():
    text, _ = await ask(words("yes") + b"data: [DONE]\n\n")
    assert "sent no time line" in text
