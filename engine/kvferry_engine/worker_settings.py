"""Settings that prefillers and decoders share: the model, its cache, the fabric."""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from kvferry_node.errors import SettingsError
from kvferry_node.settings import Bytes, NodeSettings, Seconds, help_text

CPU = "cpu"
DEVICE = r"^(auto|cpu|cuda(:\d{1,3})?)$"
"""What --device may be."""
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class WorkerSettings(NodeSettings, kw_only=True, frozen=True):
    """Settings of every node that runs the model."""

    model: Annotated[str, help_text("Folder of the model: config.json, *.safetensors, as Hugging Face lays it out.")]
    served_model_name: Annotated[str, help_text("Name that clients ask for. Empty: the folder's name.")] = ""
    dtype: Annotated[
        Literal["float32", "bfloat16"], help_text("Of the weights as they are computed with, and of the KV cache.")
    ] = "bfloat16"
    device: Annotated[
        str,
        msgspec.Meta(pattern=DEVICE),
        help_text(
            "What computes: cpu; cuda, the first GPU, or cuda:N (with --tp, that one and those after it); auto, a GPU "
            "where there is one.",
            form="cpu, cuda, cuda:N or auto",
        ),
    ] = "cpu"
    attention: Annotated[
        Literal["auto", "torch", "flashinfer"],
        help_text("What computes attention: plain torch; FlashInfer, on a GPU alone; auto, FlashInfer where it can."),
    ] = "auto"
    cuda_graphs: Annotated[
        bool,
        help_text("Replay decode steps as CUDA graphs, with FlashInfer, for models without experts; for GPUs alone."),
    ] = False
    page_size: Annotated[
        int, msgspec.Meta(ge=1, le=1024), help_text("Tokens in a KV page; the same on all nodes of a cluster.")
    ] = 16
    tp: Annotated[
        int,
        msgspec.Meta(ge=1, le=64),
        help_text("Tensor-parallel ranks: processes that hold a slice of weights and KV cache each."),
    ] = 1
    kv_memory: Annotated[Bytes, help_text("Memory for KV pages, of each rank.")] = 1 << 30
    kv_place: Annotated[
        Literal["auto", "gpu", "host"],
        help_text(
            "With a GPU, where KV pages lie: in its memory, or in host memory that it reads and writes over its bus. "
            "auto: in the GPU's where the provider can register that."
        ),
    ] = "auto"
    huge_pages: Annotated[bool, help_text("Take KV pages from the machine's reserved huge pages, if they suffice.")] = (
        True
    )
    provider: Annotated[
        Literal["auto", "efa", "verbs", "tcp", "net", "shm", "local"],
        help_text("What carries KV pages: a libfabric provider; local, shared memory on one host; auto, the best."),
    ] = "auto"
    fabric_host: Annotated[
        str,
        msgspec.Meta(pattern=r"^([^\s,]+(,[^\s,]+){0,7})?$"),
        help_text(
            "Addresses that the fabric binds to, for providers over IP: one for each NIC that KV pages travel over. "
            "Empty: --host.",
            form="1 to 8 addresses with commas between them",
        ),
    ] = ""
    fabric_cpus: Annotated[
        str,
        msgspec.Meta(pattern=r"^$|^none$|^\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*$"),
        help_text(
            "CPUs that the fabric's thread is pinned to. Empty: those near its NICs, where some are nearer; none: it "
            "is not pinned.",
            form="CPUs such as 0-3,8, or none",
        ),
    ] = ""
    verify_kv: Annotated[
        bool, help_text("Compare the checksum of every page sent with its source; a difference fails the request.")
    ] = False
    prefix_cache: Annotated[
        bool, help_text("Keep the pages of what was computed or received, and share those of equal prefixes.")
    ] = True
    max_waiting: Annotated[Count, help_text("Requests that may wait here; more are refused.")] = 256
    threads: Annotated[
        int,
        msgspec.Meta(ge=0, le=1024),
        help_text("CPU threads of the forward pass, over all ranks; 0 takes one per core."),
    ] = 0
    idle_check_seconds: Annotated[
        Seconds, help_text("How often an idle node proves that it holds no page, slot or transfer.")
    ] = 5.0

    def __post_init__(self) -> None:
        """Check what no single field can tell. Raises SettingsError."""
        super().__post_init__()
        hosts = self.fabric_hosts
        if len(set(hosts)) < len(hosts):
            msg = f"each address of --fabric-host must be another NIC's; got {self.fabric_host}"
            raise SettingsError(msg)
        if self.cuda_graphs and self.device == CPU:
            msg = "--cuda-graphs replays steps on a GPU, and --device cpu takes none"
            raise SettingsError(msg)

    @property
    def fabric_hosts(self) -> tuple[str, ...]:
        """Local address of each of the fabric's domains."""
        return tuple(self.fabric_host.split(",")) if self.fabric_host else (self.host,)

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        return self.served_model_name or Path(self.model).resolve().name

    @property
    def cpu_threads(self) -> int:
        """Threads that the forward pass takes, over all ranks."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def rank_threads(self) -> int:
        """Threads that each rank's share of the forward pass takes."""
        return max(1, self.cpu_threads // self.tp)
