"""`kvferry prefiller`: run one prefiller.

What runs the model is imported when it is to run: torch takes seconds, and settings that can't work are refused before.
"""

from kvferry_engine.errors import ModelError
from kvferry_engine.feasible import check_worker
from kvferry_fabric import FabricError
from kvferry_node.logs import setup_logging
from kvferry_node.options import settings_command
from kvferry_node.service import run
from kvferry_node.settings import node_ref
from kvferry_proto.nodes import Role

from kvferry_prefiller.settings import PrefillerSettings


@settings_command(PrefillerSettings, Role.PREFILLER, check_worker)
def command(settings: PrefillerSettings) -> None:
    """Run one prefiller until SIGTERM or Ctrl-C."""
    from kvferry_engine.ranks.processes import RankProcesses  # noqa: PLC0415

    from kvferry_prefiller.node import PrefillerNode  # noqa: PLC0415

    ref = node_ref(settings, Role.PREFILLER)
    setup_logging(settings.log_level, settings.log_format, ref, Role.PREFILLER)
    with RankProcesses.fork(settings) as ranks:
        run(PrefillerNode(settings, ref, ranks).main, (ModelError, FabricError))
