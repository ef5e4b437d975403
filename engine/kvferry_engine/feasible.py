"""Whether a node's model and machine can do what its settings ask: said before anything starts.

Without torch, which takes seconds to import, unless a GPU is asked for.
"""

from pathlib import Path

import psutil
from kvferry_fabric import FabricError, FabricUnavailableError, providers
from kvferry_node.errors import SettingsError

from kvferry_engine.config import ModelConfig
from kvferry_engine.draft_layers import with_stored_drafts
from kvferry_engine.errors import ModelError
from kvferry_engine.kv_size import enough_pages, kv_layout
from kvferry_engine.split import check_ranks
from kvferry_engine.whole_weights import check_whole
from kvferry_engine.worker_settings import CPU, WorkerSettings


def check_worker(settings: WorkerSettings) -> ModelConfig:
    """Return the model's configuration. Raises SettingsError, which names the flag and what stands against it."""
    _check_device(settings)
    config = _config(settings)
    _check_ranks(settings, config)
    _check_memory(settings, config)
    _check_provider(settings)
    return config


def _config(settings: WorkerSettings) -> ModelConfig:
    folder = Path(settings.model)
    try:
        config = ModelConfig.from_folder(folder)
        check_whole(folder)
        return with_stored_drafts(folder, config)
    except ModelError as error:
        msg = f"--model: {error}"
        raise SettingsError(msg) from error


def _check_ranks(settings: WorkerSettings, config: ModelConfig) -> None:
    try:
        check_ranks(config, settings.tp)
    except ModelError as error:
        msg = f"--tp {settings.tp}: {error}"
        raise SettingsError(msg) from error


def _check_memory(settings: WorkerSettings, config: ModelConfig) -> None:
    asked, there = settings.kv_memory * settings.tp, psutil.virtual_memory().total
    if settings.device == CPU and asked > there:
        # Such a pool can be made, and ends the process when its pages fill.
        msg = f"--kv-memory: {asked} bytes for {settings.tp} ranks are more than this machine has, {there}"
        raise SettingsError(msg)
    try:
        layout = kv_layout(config, dtype=settings.dtype, page_size=settings.page_size, ranks=settings.tp)
        enough_pages(layout, settings.kv_memory)
    except ModelError as error:
        msg = f"--model: {error}"
        raise SettingsError(msg) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _check_device(settings: WorkerSettings) -> None:
    if settings.device != CPU:
        # Here, since it imports torch.
        from kvferry_engine.devices import resolve  # noqa: PLC0415

        resolve(settings.device, settings.tp)


def _check_provider(settings: WorkerSettings) -> None:
    host, wanted = settings.fabric_hosts[0], settings.provider
    try:
        present = providers(host)
    except (FabricError, FabricUnavailableError) as error:
        msg = f"--provider {wanted}: {error}"
        raise SettingsError(msg) from error
    if wanted != "auto" and wanted not in present:
        msg = f"--provider {wanted}: this machine has none at {host}; it has {', '.join(present)}"
        raise SettingsError(msg)
