"""--fault: what a worker's fabric and model are told to do wrong."""

from collections.abc import Mapping

from kvferry_fabric import TransferEngine
from kvferry_node.logs import get_logger

# Faults that the fabric injects by itself, and what its numbers mean there.
_FABRIC_FAULTS = {"corrupt-write": ("corrupt", 1), "delay-write-ms": ("delay", 1_000_000), "fail-write": ("fail", 1)}
_MODEL_FAULTS = {"slow-layer-ms"}


def inject(fabric: TransferEngine, faults: Mapping[str, float]) -> None:
    """Have the fabric commit its share of the faults. Raises ValueError if one is not known."""
    unknown = set(faults) - set(_FABRIC_FAULTS) - _MODEL_FAULTS
    if unknown:
        msg = f"--fault: unknown {sorted(unknown)}; known are {sorted([*_FABRIC_FAULTS, *_MODEL_FAULTS])}"
        raise ValueError(msg)
    for name in set(faults) & set(_FABRIC_FAULTS):
        kind, unit = _FABRIC_FAULTS[name]
        get_logger().warning("fault injection is on", fault=name, value=faults[name])
        fabric.fault(kind, int(faults[name] * unit))
