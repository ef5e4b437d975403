"""`kvferry decoder`: run one decoder.

What runs the model is imported when it is to run: torch takes seconds, and settings that can't work are refused before.
"""

from kvferry_engine.errors import ModelError
from kvferry_engine.feasible import check_worker
from kvferry_fabric import FabricError
from kvferry_node.errors import SettingsError
from kvferry_node.logs import setup_logging
from kvferry_node.options import settings_command
from kvferry_node.service import run
from kvferry_node.settings import node_ref
from kvferry_proto.nodes import Role

from kvferry_decoder.settings import DecoderSettings


def _check(settings: DecoderSettings) -> None:
    config = check_worker(settings)
    if settings.speculate == "mtp" and not config.draft_layers:
        msg = f"--speculate mtp: the model in {settings.model} has no drafting layer"
        raise SettingsError(msg)


@settings_command(DecoderSettings, Role.DECODER, _check)
def command(settings: DecoderSettings) -> None:
    """Run one decoder until SIGTERM or Ctrl-C."""
    from kvferry_engine.ranks.processes import RankProcesses  # noqa: PLC0415

    from kvferry_decoder.node import DecoderNode  # noqa: PLC0415

    ref = node_ref(settings, Role.DECODER)
    setup_logging(settings.log_level, settings.log_format, ref, Role.DECODER)
    with RankProcesses.fork(settings) as ranks:
        run(DecoderNode(settings, ref, ranks).main, (ModelError, FabricError))
