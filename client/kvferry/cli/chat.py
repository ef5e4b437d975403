"""`kvferry chat`: talk to a running cluster over ZeroMQ."""

from collections.abc import Callable

import click
from kvferry_proto.to_router import ChatMessage
from rich.console import Console

from kvferry.answer import Completion
from kvferry.ask import Ask
from kvferry.cli.environment import FromEnvironment
from kvferry.cli.timeline import table
from kvferry.client import Client
from kvferry.errors import KvferryClientError
from kvferry.limits import CONNECT_TIMEOUT, REQUEST_TIMEOUT
from kvferry.link import DEFAULT_ENDPOINT

HELP = "/quit ends, /reset forgets what was said, /time shows the last answer's time line; Ctrl-C stops an answer."


class Chat:
    """A conversation: its history, and the way one turn goes."""

    def __init__(self, client: Client, console: Console, system: str | None, ask: Ask) -> None:
        self._client = client
        self._console = console
        self._ask = ask
        self._opening = [ChatMessage(role="system", content=system)] if system else []
        self._history = list(self._opening)
        self.last: Completion | None = None

    def say(self, text: str) -> None:
        """Send a turn and stream the answer. A turn that fails leaves no trace in the history."""
        turn = ChatMessage(role="user", content=text)
        ask: Ask = {**self._ask, "messages": [*self._history, turn]}
        with self._client.stream(**ask) as stream:
            for piece in stream:
                self._console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
            self._console.print()
            self.last = stream.completion
        self._history += [turn, ChatMessage(role="assistant", content=self.last.text)]

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self._history = list(self._opening)

    def show_time(self) -> None:
        """Show the last answer's time line."""
        if self.last is None:
            self._console.print("Nothing was answered yet.")
        else:
            self._console.print(table(self.last.timeline, self.last.usage))


@click.command(cls=FromEnvironment, context_settings={"auto_envvar_prefix": "KVFERRY_CHAT", "show_default": True})
@click.option("--endpoint", default=DEFAULT_ENDPOINT, help="ZeroMQ endpoint of a router.")
@click.option("--once", metavar="TEXT", default=None, help="Say this, print the answer and end.")
@click.option("--model", default="", help="Name of the model; empty takes whatever is served.")
@click.option("--system", default=None, help="What the model is told before the first turn.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, help="Most tokens of an answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.2, help="0 takes the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.9, help="Draw from the likeliest.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="The same seed gives the same answer.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=REQUEST_TIMEOUT, help="Seconds of an answer."
)
@click.option(
    "--connect-timeout", type=click.FloatRange(min=0, min_open=True), default=CONNECT_TIMEOUT, help="Seconds."
)
@click.option("--timeline", is_flag=True, help="Show where each answer's milliseconds went.")
def command(
    *,
    endpoint: str,
    once: str | None,
    model: str,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    timeout: float,
    connect_timeout: float,
    timeline: bool,
) -> None:
    """Talk to a running cluster.

    In a conversation, /quit ends, /reset forgets what was said, /time shows the last answer's time line, and Ctrl-C
    stops an answer. Environment variables: KVFERRY_CHAT_<OPTION>.
    """
    ask = Ask(model=model, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    console = Console(highlight=False)
    try:
        with Client(endpoint, timeout=timeout, connect_timeout=connect_timeout) as client:
            client.connect()
            chat = Chat(client, console, system, ask)
            if once is not None:
                chat.say(once)
                if timeline:
                    chat.show_time()
                return
            console.print(f"Connected to {endpoint}. {HELP}", style="dim")
            _converse(chat, console, timeline=timeline)
    except (KvferryClientError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _converse(chat: Chat, console: Console, *, timeline: bool) -> None:
    commands: dict[str, Callable[[], None]] = {
        "/reset": chat.reset,
        "/time": chat.show_time,
        "/help": lambda: console.print(HELP),
    }
    while (text := _read(console)) not in {None, "/quit", "/exit"}:
        if text in commands:
            commands[text]()
        elif text:
            _turn(chat, console, text, timeline=timeline)


def _turn(chat: Chat, console: Console, text: str, *, timeline: bool) -> None:
    try:
        chat.say(text)
    except KeyboardInterrupt:
        console.print("\nStopped.", style="yellow")
        return
    except KvferryClientError as error:
        console.print(f"\n{error}", style="red", markup=False)
        return
    if timeline:
        chat.show_time()


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
