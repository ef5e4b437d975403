"""`kvferry router`: the command that runs one router."""

from pathlib import Path

from kvferry_node.errors import SettingsError
from kvferry_node.logs import setup_logging
from kvferry_node.options import settings_command
from kvferry_node.service import Stop, run
from kvferry_proto.nodes import Role

from kvferry_router.app import Router
from kvferry_router.chat_template import ChatTemplateError
from kvferry_router.model_folder import ModelFolderError, ModelText, load_model_text
from kvferry_router.settings import RouterSettings


def _read_model(settings: RouterSettings) -> ModelText:
    try:
        return load_model_text(Path(settings.model))
    except (ModelFolderError, ChatTemplateError) as error:
        msg = f"--model {settings.model}: {error}"
        raise SettingsError(msg) from None


@settings_command(RouterSettings, Role.ROUTER, _read_model)
def command(settings: RouterSettings) -> None:
    """Run a router: the OpenAI API over HTTP, and the ZeroMQ front, before a cluster of prefillers and decoders."""
    setup_logging(settings.log_level, settings.log_format, role=Role.ROUTER)
    text = _read_model(settings)

    async def main(stop: Stop) -> None:
        router = Router(settings, text)
        setup_logging(settings.log_level, settings.log_format, router.ref, Role.ROUTER)
        await router.run(stop)

    run(main)
