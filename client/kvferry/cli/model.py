"""`kvferry model`: prepare the default model."""

import importlib
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress


def prepare(cache_dir: Path | None, console: Console) -> Path:
    """Prepare the default model, with a progress bar, and return its folder.

    Raises ClickException if the engine is not installed, or the model's package is missing.
    """
    try:
        # The engine is optional here: a client has none.
        engine = importlib.import_module("kvferry_engine.default_model")
        engine_error = importlib.import_module("kvferry_engine.errors").EngineError
    except ImportError as error:
        msg = f"preparing the default model needs the engine ({error}): pip install 'kvferry[worker]', or give --model"
        raise click.ClickException(msg) from error
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Preparing the default model", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        try:
            return Path(engine.prepare_default_model(cache_dir, show))
        except (OSError, ImportError, ValueError, engine_error) as error:
            msg = f"the default model could not be prepared: {error}"
            raise click.ClickException(msg) from error


@click.command()
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="KVFERRY_CACHE_DIR",
    help="Where to keep it. [default: the user's cache folder]",
)
def command(cache_dir: Path | None) -> None:
    """Prepare the default model (SmolLM2-135M-Instruct) once, and print its folder.

    The folder holds config.json, model.safetensors, tokenizer.json and the chat template: what --model takes.
    """
    click.echo(prepare(cache_dir, Console(stderr=True)))
