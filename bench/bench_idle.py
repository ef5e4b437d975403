"""What an idle cluster of three nodes burns: CPU time and sleeps of each node, a line of JSON each, and the sum."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kvferry_engine.default_model import prepare_default_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from cluster import Cluster
from tiny_model import make_tiny_llama


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to look")
    parser.add_argument("--settle", type=float, default=3.0, help="how long to wait before, once all nodes are ready")
    parser.add_argument("--provider", default="tcp", help="the fabric's provider")
    parser.add_argument("--used", action="store_true", help="answer a request first, so that peers are connected")
    return parser.parse_args()


def of_threads(pid: int) -> dict[str, tuple[int, int]]:
    """Nanoseconds on a core, and voluntary sleeps, of the threads of a process, added up by name."""
    ran: Counter[str] = Counter()
    slept: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        ran[name] += int((task / "schedstat").read_text().split()[0])
        lines = (task / "status").read_text().splitlines()
        slept[name] += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return {name: (ran[name], slept[name]) for name in ran}


def measure(cluster: Cluster, seconds: float) -> None:
    pids = {name: node.process.pid for name, node in cluster.nodes.items()}
    pids["redis"] = cluster.redis_process.pid
    began, before = time.monotonic(), {name: of_threads(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    after, took = {name: of_threads(pid) for name, pid in pids.items()}, time.monotonic() - began
    total = 0.0
    for name in pids:
        then, now = before[name], after[name]
        spent = {thread: now[thread][0] - then.get(thread, (0, 0))[0] for thread in now}
        wakes = sum(now[thread][1] - then.get(thread, (0, 0))[1] for thread in now)
        seconds_of_cpu = sum(spent.values()) / 1e9
        total += seconds_of_cpu if name != "redis" else 0.0
        result = {
            "bench": "idle",
            "node": name,
            "cpu_seconds": round(seconds_of_cpu, 4),
            "percent_of_core": round(100 * seconds_of_cpu / took, 3),
            "sleeps_per_second": round(wakes / took, 1),
            "threads": {thread: round(ns / 1e9 / took * 100, 3) for thread, ns in spent.items() if ns > 1e6},
        }
        print(json.dumps(result), flush=True)
    summary = {"bench": "idle", "node": "all", "nodes": len(pids) - 1, "seconds": round(took, 1)}
    print(json.dumps(summary | {"percent_of_core": round(100 * total / took, 3)}), flush=True)


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "model", prepare_default_model())
        worker = ["--kv-memory", "4MiB", "--dtype", "float32"]
        common = ["--provider", options.provider]
        with Cluster(Path(folder) / "cluster", model, worker=[*worker, *common]) as cluster:
            if options.used:
                cluster.complete(list(range(100, 200)), max_tokens=2, ignore_eos=True)
            time.sleep(options.settle)
            measure(cluster, options.seconds)


if __name__ == "__main__":
    main()
