"""kvferry's fabric: page writes over libfabric, posted layer by layer by one C thread."""

from kvferry_fabric.checksums import page_checksums
from kvferry_fabric.contract import CounterHandle, Fabric, PeerHandle, RegionHandle, TransferHandle
from kvferry_fabric.device_memory import DeviceRange
from kvferry_fabric.engine import TransferEngine
from kvferry_fabric.errors import FabricError, FabricUnavailable, FabricUnavailableError, OutOfBoundsError
from kvferry_fabric.events import (
    DomainStats,
    EngineStats,
    Event,
    EventKind,
    LayerTimes,
    TransferState,
    TransferStatistics,
)
from kvferry_fabric.handles import LayerCounter, MemoryRegion, Peer
from kvferry_fabric.providers import PROVIDERS, providers, takes_device_memory
from kvferry_fabric.runs import Runs, runs
from kvferry_fabric.schedule import ChunkSchedule, PagedWrite
from kvferry_fabric.shared_memory import SharedMemory
from kvferry_fabric.transfers import Transfer

__all__ = [
    "PROVIDERS",
    "ChunkSchedule",
    "CounterHandle",
    "DeviceRange",
    "DomainStats",
    "EngineStats",
    "Event",
    "EventKind",
    "Fabric",
    "FabricError",
    "FabricUnavailable",
    "FabricUnavailableError",
    "LayerCounter",
    "LayerTimes",
    "MemoryRegion",
    "OutOfBoundsError",
    "PagedWrite",
    "Peer",
    "PeerHandle",
    "RegionHandle",
    "Runs",
    "SharedMemory",
    "Transfer",
    "TransferEngine",
    "TransferHandle",
    "TransferState",
    "TransferStatistics",
    "page_checksums",
    "providers",
    "runs",
    "takes_device_memory",
]
