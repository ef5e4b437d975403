"""The options of `kvferry up`."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import click
from click.decorators import FC
from kvferry_proto.redis_url import without_password
from rich.console import Console

from kvferry.cli.environment import FromEnvironment
from kvferry.cli.model import prepare
from kvferry.cli.up.check import checked, redis_refusal
from kvferry.cli.up.demo import PROMPT
from kvferry.cli.up.log_folder import default_log_dir
from kvferry.cli.up.plan import ROLES, ClusterOptions
from kvferry.cli.up.redis import configured_url, unreachable
from kvferry.cli.up.run import RunOptions, run

READY_SECONDS = 180.0
ENV_PREFIX = "KVFERRY_UP"
SHM = "Over shm a process that is killed can hang others for good; --provider local does the same without that."


def _passed(flag: str, metavar: str, text: str) -> Callable[[FC], FC]:
    """An option that goes on to the services as it is: they know what it may be, and what it is by default."""
    return click.option(flag, default=None, metavar=metavar, help=f"{text} [default: the services' own]")


@click.command(cls=FromEnvironment, context_settings={"auto_envvar_prefix": ENV_PREFIX, "show_default": True})
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model folder in Hugging Face form. Without it the default model is prepared and used.",
)
@click.option(
    "--prefillers",
    type=click.IntRange(min=0),
    default=None,
    show_default="1, with --mixed 0",
    help="How many prefillers.",
)
@click.option("--decoders", type=click.IntRange(min=1), default=2, help="How many decoders.")
@click.option(
    "--prefill-tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel ranks, a process each, of a prefiller."
)
@click.option(
    "--decode-tp", type=click.IntRange(min=1), default=1, help="Tensor-parallel ranks, a process each, of a decoder."
)
@click.option(
    "--prefill-dp",
    type=click.IntRange(min=1),
    default=1,
    help="Data-parallel ranks of a prefiller: each a node of its own to the router, with the whole model.",
)
@click.option(
    "--decode-dp",
    type=click.IntRange(min=1),
    default=1,
    help="Data-parallel ranks of a decoder: each a node of its own to the router, with the whole model.",
)
@click.option("--host", default="127.0.0.1", help="Address to serve at. Keep it private: there is no authentication.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port of the OpenAI HTTP API.")
@click.option("--zmq-port", type=click.IntRange(1, 65535), default=5555, help="Port of the ZeroMQ API.")
@_passed("--provider", "NAME", "What carries the KV cache: a libfabric provider, or local: shared memory.")
@_passed("--device", "NAME", "What prefillers and decoders compute on: cpu, cuda, cuda:N, or auto.")
@_passed("--dtype", "NAME", "Of weights and KV cache: bfloat16 or float32.")
@_passed("--page-size", "TOKENS", "Tokens in a KV page.")
@_passed("--chunk-size", "TOKENS", "Most tokens of one prefill pass; with --mixed, the decoders' --prefill-budget.")
@_passed("--kv-memory", "SIZE", "KV cache of each rank, such as 512MiB.")
@_passed("--local-prefill-tokens", "TOKENS", "Prompts with at most so many tokens are prefilled by the decoder itself.")
@click.option(
    "--mixed",
    is_flag=True,
    help="No prefillers: every decoder prefills its own prompts, in chunks of --chunk-size (its --prefill-budget) "
    "beside its decoding requests. The baseline that disaggregation is compared with.",
)
@_passed("--speculate", "WAY", "How decoders guess tokens ahead: off, ngram or mtp; answers stay the same.")
@_passed("--draft-tokens", "TOKENS", "Tokens that --speculate guesses ahead at most.")
@_passed("--threads", "COUNT", "CPU threads of each prefiller's and decoder's forward pass.")
@click.option("--served-model-name", default=None, help="Name that clients ask for. [default: the folder's name]")
@click.option("--verify-kv", is_flag=True, help="Compare checksums of every KV page, source against destination.")
@_passed("--log-level", "LEVEL", "Least severity that the services log.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder for a log file per process. [default: ~/.local/state/kvferry/logs/PORT]",
)
@click.option("--ready-seconds", type=float, default=READY_SECONDS, help="How long the cluster may take to come up.")
@_passed("--drain-seconds", "SECONDS", "How long running requests may take to end.")
@click.option("--namespace", default=None, help="Prefix of Redis keys, where several clusters share one Redis.")
@click.option("--demo", is_flag=True, help="Send one chat completion when all is ready, and show its time line.")
@click.option("--oneshot", is_flag=True, help="Like --demo, and end after the answer: status 0 if it came.")
@click.option("--prompt", default=PROMPT, show_default="a passage and a question", help="What --demo asks.")
@click.option("--router-arg", multiple=True, metavar="ARG", help="Passed to the router as it is; may be repeated.")
@click.option("--prefiller-arg", multiple=True, metavar="ARG", help="Passed to every prefiller; may be repeated.")
@click.option("--decoder-arg", multiple=True, metavar="ARG", help="Passed to every decoder; may be repeated.")
@click.option("--fault-router", default=None, metavar="NAME=N,...", help="For tests: faults that the router injects.")
@click.option("--fault-prefiller", default=None, metavar="NAME=N,...", help="For tests: faults of every prefiller.")
@click.option("--fault-decoder", default=None, metavar="NAME=N,...", help="For tests: faults of every decoder.")
@click.pass_context
def command(ctx: click.Context, /, **given: object) -> None:
    """Start a whole cluster on this machine, and keep it up until Ctrl-C.

    A router, prefillers and decoders run as child processes, with a Redis of their own on a private socket, or with
    the one that REDIS_URL names. A process that dies is started again. Ctrl-C drains: requests that run may end,
    and no process stays behind; a second Ctrl-C does not wait.

    Environment variables: KVFERRY_UP_<OPTION> for every option, REDIS_URL.
    """
    console = Console(highlight=False)
    _check_surroundings(given["port"], given["zmq_port"])
    given["prefillers"] = _prefillers(given["prefillers"], mixed=bool(given["mixed"]))
    model = given.pop("model") or prepare(None, console)
    extra = {role: list(given.pop(f"{role}_arg")) for role in ROLES}  # type: ignore[call-overload]  # a tuple of texts
    faults = {role: str(fault) for role in ROLES if (fault := given.pop(f"fault_{role}"))}
    running = {name: given.pop(name) for name in ("demo", "oneshot", "prompt", "ready_seconds")}
    log_dir = given.pop("log_dir") or default_log_dir(int(str(given["port"])))
    cluster = ClusterOptions(model=model, extra=extra, faults=faults, **given)  # type: ignore[arg-type]  # click checked
    options = RunOptions(cluster=checked(cluster), log_dir=log_dir, **running)  # type: ignore[arg-type]
    if cluster.provider == "shm":
        console.print(SHM, style="yellow", soft_wrap=True)
    ctx.exit(asyncio.run(run(options, console)))


def _check_surroundings(port: object, zmq_port: object) -> None:
    """Raise UsageError where two servers would share a port, or the Redis that is named can't be had."""
    if port == zmq_port:
        msg = f"--port and --zmq-port are both {port}: each API needs a port of its own"
        raise click.UsageError(msg)
    url = configured_url()
    if url and (why := unreachable(url)):
        msg = (
            f"the Redis that REDIS_URL names can't be reached ({why}): start it, or unset REDIS_URL for one of our own"
        )
        raise click.UsageError(msg)
    if url and (why := redis_refusal(url)):
        msg = f"the Redis that REDIS_URL names, {without_password(url)}, {why}"
        raise click.UsageError(msg)


def _prefillers(asked: object, *, mixed: bool) -> int:
    """How many prefillers to start. Raises UsageError where they would have nothing to do."""
    if mixed and asked:
        msg = f"--mixed has no prefillers, and --prefillers {asked} asks for some"
        raise click.UsageError(msg)
    return int(str(asked)) if asked is not None else int(not mixed)
