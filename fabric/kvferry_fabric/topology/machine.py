"""A machine as both readers describe it: cores, GPUs and NICs, each with its place in the PCI tree."""

import msgspec

INFINIBAND, ETHERNET, EFA = "InfiniBand", "Ethernet", "EFA"
"""Link layers. EFA speaks a protocol of its own over Ethernet, so its devices are no peers of Ethernet NICs."""


class Core(msgspec.Struct, frozen=True, kw_only=True):
    """One physical core."""

    cpus: tuple[int, ...]
    """Logical CPUs (hardware threads) of the core, ascending."""
    numa: int | None
    """NUMA node; None where the machine does not say."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that can hold a KV cache."""

    address: str
    """PCI address, such as 0000:53:00.0: the one name that CUDA_VISIBLE_DEVICES can't change."""
    model: str
    path: tuple[str, ...]
    """What is above it: the host bridge (pci0000:44), then the PCI addresses of bridges, the nearest last."""
    numa: int | None


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One network function on the PCI bus: an RDMA device, a network interface, or both."""

    address: str
    ids: str
    """PCI vendor and device, such as 15b3:1021."""
    path: tuple[str, ...]
    numa: int | None
    rdma: str = ""
    """RDMA device, such as mlx5_0; "" if it has none."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces, sorted."""
    model: str = ""
    link_layer: str = ""
    """InfiniBand, Ethernet or EFA; "" if unknown."""
    port_gbps: float | None = None
    """Rate of the port, Gb/s; None if unknown. hwloc does not tell it, sysfs does."""
    slot_gbps: float | None = None
    """Rate of the PCI link, Gb/s; None if unknown."""
    up: bool | None = None
    """Whether the link is up; None if unknown."""
    wireless: bool = False

    @property
    def name(self) -> str:
        """The name people know it by."""
        return self.rdma or next(iter(self.interfaces), self.address)

    @property
    def provider(self) -> str:
        """Libfabric provider that drives it best: efa, verbs or tcp."""
        if not self.rdma:
            return "tcp"
        return "efa" if self.link_layer == EFA else "verbs"

    def domain(self, provider: str | None = None) -> str | None:
        """Return the name of its libfabric domain under `provider` (default: its best); None if it has none there.

        efa names domains after the device and the endpoint's type; verbs after the device; tcp and net after the
        network interface. shm has no NIC.
        """
        match provider or self.provider:
            case "efa":
                return f"{self.rdma}-rdm" if self.rdma and self.link_layer == EFA else None
            case "verbs":
                return self.rdma if self.rdma and self.link_layer != EFA else None
            case "tcp" | "net":
                return next(iter(self.interfaces), None)
            case _:
                return None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader found. Order is that of CPU numbers and PCI addresses, so equal machines compare equal."""

    source: str
    """Where it was read from, for people: "hwloc", "sysfs", a file's name."""
    name: str = ""
    """Product, where the firmware tells; "" if not."""
    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    notes: tuple[str, ...] = ()
    """What was skipped, and why."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have cores, ascending."""
        return tuple(sorted({core.numa for core in self.cores if core.numa is not None}))
