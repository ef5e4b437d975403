"""A request's time line as a small table."""

from kvferry_proto.timeline import PrefillTimeline, Timeline, summary_ms
from kvferry_proto.usage import Usage
from rich.table import Table


def table(timeline: Timeline, usage: Usage | None = None) -> Table:
    """Lay out where the milliseconds went, counted from the router's receipt of the request."""
    phases = summary_ms(timeline)
    grid = Table(title="Where the milliseconds went", title_justify="left", show_edge=False, pad_edge=False)
    grid.add_column("at ms", justify="right")
    grid.add_column("took ms", justify="right")
    grid.add_column("what")
    for at, took, what in rows(timeline, phases):
        grid.add_row(_number(at), _number(took), what)
    for line in _totals(timeline, usage):
        grid.add_row("", "", line)
    return grid


Row = tuple[float | None, float | None, str]


def rows(timeline: Timeline, phases: dict[str, float]) -> list[Row]:
    """Return (when, how long, what) of every phase that happened, in order."""
    found: list[Row] = [
        (0.0, phases.get("queued_ms"), "queued, until a forward pass took the request up"),
        *_chunks(timeline.prefiller, phases),
    ]
    marks = (
        ("last_page_ms", "last page arrived at the decoder"),
        ("joined_ms", "joined the decode batch"),
        ("first_token_ms", "first token at the router"),
        ("finished_ms", "answer complete"),
    )
    found += [(phases[name], None, what) for name, what in marks if name in phases]
    if "exposed_transfer_ms" in phases:
        found.append((None, phases["exposed_transfer_ms"], "of the transfer was not hidden behind compute"))
    return found


def _chunks(prefiller: PrefillTimeline | None, phases: dict[str, float]) -> list[Row]:
    if prefiller is None or "prefill_started_ms" not in phases:
        return []
    first, begun = prefiller.chunks[0].started, phases["prefill_started_ms"]
    return [
        (
            begun + (chunk.started - first) / 1e6,
            (chunk.ended - chunk.started) / 1e6,
            f"prefill chunk {number}: {chunk.tokens} tokens",
        )
        for number, chunk in enumerate(prefiller.chunks, 1)
    ]


def _totals(timeline: Timeline, usage: Usage | None) -> list[str]:
    lines, prefiller, decoder = [], timeline.prefiller, timeline.decoder
    if prefiller is None:
        lines.append("no prefiller took part: the decoder prefilled by itself")
    else:
        moved = f"{prefiller.bytes / (1 << 20):.1f} MiB"
        lines.append(f"{prefiller.pages} page arrivals, {moved}, {prefiller.writes} writes")
    if usage is not None:
        lines.append(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} answered")
    if decoder.drafted:
        lines.append(f"{decoder.accepted} of {decoder.drafted} drafts were right")
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
