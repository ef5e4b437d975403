"""The options of `kvferry doctor`, and how findings are shown."""

from pathlib import Path

import click
import msgspec
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.doctor import fabric, machine, redis
from kvferry.cli.doctor.finding import Finding, Level
from kvferry.cli.doctor.model import model as check_model
from kvferry.cli.doctor.ports import ports
from kvferry.cli.doctor.topology import topology as read_topology
from kvferry.cli.environment import FromEnvironment
from kvferry.cli.up.redis import configured_url

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def examine(model: Path | None, host: str, http_port: int, zmq_port: int) -> list[Finding]:
    """Look at everything."""
    return [
        machine.python(),
        machine.torch(),
        machine.cores(),
        machine.memory(),
        machine.memlock(),
        machine.shared_memory(),
        fabric.libfabric(),
        fabric.providers(),
        *fabric.offered(),
        redis.redis(configured_url()),
        *ports(host, http_port, zmq_port),
        check_model(model),
    ]


@click.command(cls=FromEnvironment, context_settings={"auto_envvar_prefix": "KVFERRY_DOCTOR", "show_default": True})
@click.option("--model", type=click.Path(path_type=Path), default=None, help="Model folder to look at.")
@click.option("--host", default="127.0.0.1", help="Address that the router will bind to.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port of the OpenAI HTTP API.")
@click.option("--zmq-port", type=click.IntRange(1, 65535), default=5555, help="Port of the ZeroMQ API.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings, or the topology, as JSON.")
@click.option("--topology", is_flag=True, help="Draw who uses which NIC and which cores instead.")
@click.option(
    "--topology-file",
    type=click.Path(path_type=Path),
    default=None,
    help="Draw another machine's, from a file that `lstopo --of xml` wrote there.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    model: Path | None,
    host: str,
    port: int,
    zmq_port: int,
    as_json: bool,
    topology: bool,
    topology_file: Path | None,
) -> None:
    """Check this machine, and say what to do about each finding.

    Looks at Python, torch, cores, memory, the memlock limit, /dev/shm, libfabric and its providers, the topology,
    Redis, the router's ports and the model folder. Ends with status 1 if something is wrong that keeps kvferry from
    running.
    """
    if topology or topology_file is not None:
        drawn = read_topology(topology_file)
        click.echo(_json(drawn.plan) if as_json else drawn.drawing)
        return
    findings = examine(model, host, port, zmq_port)
    if as_json:
        click.echo(_json(findings))
    else:
        _show(findings, Console(highlight=False))
    ctx.exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)


def _json(value: object) -> bytes:
    return orjson.dumps(msgspec.to_builtins(value), option=orjson.OPT_INDENT_2)


def _show(findings: list[Finding], console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        word = f"[{STYLES[finding.level]}]{finding.level.upper()}[/]"
        grid.add_row(word, finding.name, escape(finding.text))
        if finding.advice:
            grid.add_row("", "", f"[dim]-> {escape(finding.advice)}[/dim]")
    console.print(grid)
