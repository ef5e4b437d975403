"""`kvferry router`: the command that runs one router."""

from pathlib import Path

import click
from kvferry_node.logs import setup_logging
from kvferry_node.options import settings_command
from kvferry_node.service import Stop, run
from kvferry_proto.nodes import Role

from kvferry_router.app import Router
from kvferry_router.chat_template import ChatTemplateError
from kvferry_router.model_folder import ModelFolderError, load_model_text
from kvferry_router.settings import RouterSettings


@settings_command(RouterSettings, Role.ROUTER)
def command(settings: RouterSettings) -> None:
    """Run a router: the OpenAI API over HTTP, and the ZeroMQ front, before a cluster of prefillers and decoders."""
    setup_logging(settings.log_level, settings.log_format, role=Role.ROUTER)
    try:
        text = load_model_text(Path(settings.model))
    except (ModelFolderError, ChatTemplateError) as error:
        msg = f"--model {settings.model}: {error}"
        raise click.UsageError(msg) from None

    async def main(stop: Stop) -> None:
        router = Router(settings, text)
        setup_logging(settings.log_level, settings.log_format, router.ref, Role.ROUTER)
        await router.run(stop)

    run(main)
