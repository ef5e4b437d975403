"""One chat completion through the cluster's own HTTP front: the proof that it works."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import orjson
from kvferry_proto.timeline import Timeline
from kvferry_proto.usage import Usage
from rich.console import Console

from kvferry.cli.timeline import table

READ_TIMEOUT = 120.0
"""Seconds between two pieces of the answer."""
MAX_TOKENS = 60

# A few hundred tokens, so that the prompt is worth a prefiller's time; the question last, as small models like it.
YESTERDAY = (
    "The ferry between the two towns has crossed the river for more than a hundred years. In the beginning it was a "
    "flat wooden boat, pulled along a rope by two men, and it carried farmers, their baskets and now and then a cow. "
    "When the railway came to the northern bank, the boat became too small. The towns bought a steamer with room for "
    "sixty people and four wagons, and the crossing, which had taken half an hour, took nine minutes. In winter, when "
    "ice came down the river, the steamer stayed in the harbour, and people walked two hours to the stone bridge."
)
TODAY = (
    "Today the ferry is electric. Its batteries are charged at the southern pier while passengers get on and off, and "
    "a captain and one deckhand are all the crew it needs. It leaves every fifteen minutes from six in the morning "
    "until midnight, carries bicycles without a charge, and has been late on only three days in the last year: twice "
    "because of fog, and once because a family of swans had settled on the landing. The old wooden boat can still be "
    "seen. It lies in the garden of the museum on the northern bank, and children may climb into it."
)
QUESTION = "Question: Where can the old wooden boat be seen today?"
PROMPT = "\n\n".join([YESTERDAY, TODAY, QUESTION])


class DemoError(Exception):
    """The cluster did not answer as it should; the message says how."""


async def demo(client: httpx.AsyncClient, base_url: str, console: Console, prompt: str) -> None:
    """Ask, stream the answer to the terminal and show its time line. Raises DemoError."""
    console.print("\n[bold]One request through the cluster[/bold]", highlight=False)
    console.print(f"{prompt}\n", style="dim", markup=False, highlight=False)
    try:
        model = await _model(client, base_url)
        text, last = await _answer(client, base_url, model, prompt, console)
    except httpx.HTTPError as error:
        msg = f"{base_url} broke off: {error or type(error).__name__}"
        raise DemoError(msg) from error
    if not text.strip():
        msg = "the answer was empty"
        raise DemoError(msg)
    console.print("\n")
    _show_timeline(last, console)


async def _model(client: httpx.AsyncClient, base_url: str) -> str:
    answer = await client.get(f"{base_url}/v1/models", headers={"Connection": "close"})
    models = answer.json().get("data") if answer.is_success else None
    if not models:
        msg = f"{base_url}/v1/models names no model: {answer.status_code} {answer.text[:500]}"
        raise DemoError(msg)
    return str(models[0]["id"])


async def _answer(
    client: httpx.AsyncClient, base_url: str, model: str, prompt: str, console: Console
) -> tuple[str, dict[str, Any]]:
    """Return the answer's text, and what the last events said beside it."""
    pieces: list[str] = []
    last: dict[str, Any] = {}
    async for event in _events(client, f"{base_url}/v1/chat/completions", _body(model, prompt)):
        if "error" in event:
            msg = f"the answer failed: {event['error'].get('message', event['error'])}"
            raise DemoError(msg)
        last |= {name: event[name] for name in ("usage", "kvferry") if event.get(name)}
        for choice in event.get("choices", []):
            piece = choice.get("delta", {}).get("content") or ""
            pieces.append(piece)
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    return "".join(pieces), last


def _body(model: str, prompt: str) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "kvferry_timeline": True,
        }
    )


async def _events(client: httpx.AsyncClient, url: str, body: bytes) -> AsyncIterator[dict[str, Any]]:
    headers = {"Content-Type": "application/json", "Connection": "close"}
    async with client.stream("POST", url, content=body, headers=headers, timeout=READ_TIMEOUT) as answer:
        if not answer.is_success:
            await answer.aread()
            msg = f"{url} answers {answer.status_code}: {answer.text[:500]}"
            raise DemoError(msg)
        async for line in answer.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield orjson.loads(data)


def _show_timeline(last: dict[str, Any], console: Console) -> None:
    record = last.get("kvferry")
    if not record:
        console.print("[yellow]The router sent no time line.[/yellow]")
        return
    timeline = msgspec.convert(record["timeline"], Timeline)
    usage = last.get("usage")
    counts = None
    if usage:
        counts = Usage(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"])
    console.print(table(timeline, counts))
