"""The life of one `kvferry up`: ports, Redis, children, the demonstration, and the end of it all."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.markup import escape

from kvferry.cli import INTERRUPTED
from kvferry.cli.up.child import Child
from kvferry.cli.up.demo import DemoError, demo
from kvferry.cli.up.flags import flag
from kvferry.cli.up.log_folder import owned
from kvferry.cli.up.plan import ClusterOptions, service_specs
from kvferry.cli.up.ports import pick, refusal
from kvferry.cli.up.redis import configured_url, redis_spec, socket_url
from kvferry.cli.up.spec import ChildSpec
from kvferry.cli.up.supervisor import StartError, Supervisor
from kvferry.cli.up.workspace import workspace

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Planner = Callable[[ClusterOptions, Path, httpx.AsyncClient], list[ChildSpec]]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A cluster, and what to do with it."""

    cluster: ClusterOptions
    log_dir: Path
    demo: bool = False
    oneshot: bool = False
    prompt: str
    ready_seconds: float


def plan(options: ClusterOptions, folder: Path, client: httpx.AsyncClient) -> list[ChildSpec]:
    """Describe all children. Raises ClickException for a port that can't be taken, or a Redis that can't be had."""
    for port, name in ((options.port, "--port"), (options.zmq_port, "--zmq-port")):
        if refused := refusal(options.host, port):
            msg = f"{refused.text}: choose another with {flag('--host' if refused.of_host else name)}"
            raise click.ClickException(msg)
    url = configured_url()
    try:
        own = [] if url else [redis_spec(folder)]
        ports = pick(options.host, len(options.workers))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    return own + service_specs(options, url or socket_url(folder), ports, client)


async def run(options: RunOptions, console: Console, planner: Planner = plan) -> int:
    """Run until a signal comes (or, for a one-shot, until the answer); returns the exit status."""
    with ExitStack() as stack:
        folder = stack.enter_context(workspace())
        async with httpx.AsyncClient(trust_env=False) as client:
            specs = planner(options.cluster, folder, client)
            # After the ports: that one of them is taken says more than that its owner's logs are.
            stack.enter_context(owned(options.log_dir))
            return await _Run(options, console, client, specs).all()


class _Run:
    def __init__(
        self, options: RunOptions, console: Console, client: httpx.AsyncClient, specs: list[ChildSpec]
    ) -> None:
        self._options = options
        self._console = console
        self._client = client
        self._supervisor = Supervisor(specs, options.log_dir, self._report)
        self._signalled = asyncio.Event()

    async def all(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signal)
        try:
            return await self._serve()
        except StartError as error:
            self._show_failure(error)
            return 1
        except OSError as error:
            self._console.print(f"[red]A process could not be started:[/red] {escape(str(error))}")
            return 1
        finally:
            with self._console.status("Stopping"):
                await self._supervisor.stop()
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    async def _serve(self) -> int:
        with self._console.status("Starting") as status:

            def waiting(late: list[Child]) -> None:
                names = ", ".join(child.spec.name for child in late)
                status.update(f"Waiting for {names} [dim]({escape(late[0].why)})[/dim]")

            if not await self._unless_signalled(self._supervisor.start(self._options.ready_seconds, waiting)):
                return INTERRUPTED
        self._show_urls()
        if self._options.demo or self._options.oneshot:
            answered = await self._demo()
            if self._options.oneshot:
                return 0 if answered else 1
        self._console.print("\nServing until Ctrl-C.")
        await self._unless_signalled(self._supervisor.watch())
        self._console.print("\nDraining; a second Ctrl-C does not wait.")
        return 0

    async def _demo(self) -> bool:
        url, prompt = self._options.cluster.base_url, self._options.prompt
        try:
            return await self._unless_signalled(demo(self._client, url, self._console, prompt))
        except DemoError as error:
            self._console.print(f"\n[red]The request failed:[/red] {escape(str(error))}")
            self._console.print(f"Logs: {self._options.log_dir}")
            return False

    async def _unless_signalled(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work, or give it up at a signal; returns whether it was done."""
        doing = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({doing, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if doing.done():
            doing.result()
            return True
        doing.cancel()
        await asyncio.wait({doing})
        return False

    def _signal(self) -> None:
        if self._signalled.is_set():
            self._supervisor.hurry()
        self._signalled.set()

    def _report(self, child: Child, text: str) -> None:
        self._console.print(f"  {child.spec.name:<14}{text}", markup=False)

    def _show_failure(self, error: StartError) -> None:
        self._console.print(f"\n[red]The cluster did not come up:[/red] {escape(str(error))}")
        self._console.print(f"The last lines of {error.child.log}:")
        self._console.print(error.child.tail(), markup=False, style="dim")

    def _show_urls(self) -> None:
        cluster = self._options.cluster
        self._console.print(f"\n[bold]OpenAI API[/bold]  {cluster.base_url}/v1")
        self._console.print(f"[bold]ZeroMQ[/bold]      tcp://{cluster.host}:{cluster.zmq_port}  (kvferry chat)")
        self._console.print(f"[bold]Metrics[/bold]     {cluster.base_url}/metrics")
        self._console.print(f"[bold]Logs[/bold]        {self._options.log_dir}")
