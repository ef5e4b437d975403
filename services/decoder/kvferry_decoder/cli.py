"""`kvferry decoder`: run one decoder."""

from kvferry_engine.ranks.processes import RankProcesses
from kvferry_node.logs import setup_logging
from kvferry_node.options import settings_command
from kvferry_node.service import run
from kvferry_node.settings import node_ref
from kvferry_proto.nodes import Role

from kvferry_decoder.node import DecoderNode
from kvferry_decoder.settings import DecoderSettings


@settings_command(DecoderSettings, Role.DECODER)
def command(settings: DecoderSettings) -> None:
    """Run one decoder until SIGTERM or Ctrl-C."""
    ref = node_ref(settings, Role.DECODER)
    setup_logging(settings.log_level, settings.log_format, ref, Role.DECODER)
    with RankProcesses.fork(settings) as ranks:
        run(DecoderNode(settings, ref, ranks).main)
