"""The top of the command tree: commands of our own, and those that installed services offer."""

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points, version

import click

from kvferry.cli import INTERRUPTED

GROUP = "kvferry.commands"
"""Entry-point group in which a service names its click command, so that the client package imports no service."""

BUILT_IN = {
    "up": ("kvferry.cli.up.command:command", "Start a whole cluster on this machine, and keep it up."),
    "chat": ("kvferry.cli.chat:command", "Talk to a running cluster."),
    "doctor": ("kvferry.cli.doctor.command:command", "Check this machine, and say what to do about each finding."),
    "model": ("kvferry.cli.model:command", "Prepare the default model and print its folder."),
}
# Known by name, so that `kvferry --help` need not load an engine to list them.
SERVICES = {
    "router": "Run a router: the OpenAI HTTP and ZeroMQ fronts, and placement.",
    "prefiller": "Run a prefiller: it fills KV pages and sends them to decoders.",
    "decoder": "Run a decoder: it receives KV pages and answers token by token.",
}


class Root(click.Group):
    """Loads a command when it is called, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Name every command."""
        return [*BUILT_IN, *(each.name for each in _services())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load one command."""
        if cmd_name in BUILT_IN:
            module, _, name = BUILT_IN[cmd_name][0].partition(":")
            return _command(getattr(importlib.import_module(module), name))
        return service(cmd_name) if cmd_name in {each.name for each in _services()} else None

    def invoke(self, ctx: click.Context) -> object:
        """Load and run a command; Ctrl-C, also while it is being imported, ends it as shells have it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with a line each, loading none."""
        lines = {name: line for name, (_, line) in BUILT_IN.items()} | SERVICES
        rows = [(name, lines.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def service(name: str) -> click.Command:
    """Load the command of a service. Raises ClickException if it is not installed."""
    for each in _services():
        if each.name == name:
            return _load(each)
    msg = f"no {name} is installed here: pip install 'kvferry[router,worker]'"
    raise click.ClickException(msg)


def _services() -> list[EntryPoint]:
    order = list(SERVICES)
    found = [each for each in entry_points(group=GROUP) if each.name not in BUILT_IN]
    return sorted(found, key=lambda each: (order.index(each.name) if each.name in order else len(order), each.name))


def _load(entry: EntryPoint) -> click.Command:
    extra = "router" if entry.name == "router" else "worker"
    try:
        return _command(entry.load())
    except ImportError as error:
        msg = f"`kvferry {entry.name}` can't be loaded: {error}. Is its extra installed? pip install 'kvferry[{extra}]'"
        raise click.ClickException(msg) from error


def _command(loaded: object) -> click.Command:
    if not isinstance(loaded, click.Command):
        msg = f"{loaded!r} is no click command"
        raise click.ClickException(msg)
    return loaded


@click.command(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvferry"), prog_name="kvferry", message=f"%(prog)s %(version)s, Python {sys.version}")
def root() -> None:
    """Serve large language models with prefill and decode apart, the KV cache ferried between them.

    Options can also be given as environment variables: KVFERRY_<NAME> for the services (and a TOML file, --config),
    KVFERRY_UP_<NAME> for up, KVFERRY_CHAT_<NAME> for chat.
    """
