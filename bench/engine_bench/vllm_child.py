"""vLLM in a process and an environment of its own: `python -m engine_bench.vllm_child FOLDER SEQUENCES TOKENS`.

It prints {"ready": true}, and then answers each line on stdin, {"phase", "size", "steps"}, with {"seconds"}. It ends
with stdin. The engine runs in this process, without a server: so its steps are timed as ours are.
"""

import json
import os
import sys
import time
from itertools import count

from vllm import LLM, SamplingParams

from engine_bench.cases import CONTEXT, prompt


class Engine:
    """The steps of vLLM's engine, one by one."""

    def __init__(self, folder: str, sequences: int, tokens: int) -> None:
        self._engine = LLM(
            folder, dtype="bfloat16", max_model_len=tokens, max_num_seqs=sequences, enable_prefix_caching=False
        ).llm_engine  # fmt: skip
        self._names = count()

    def prefill(self, tokens: int, steps: int) -> float:
        """Seconds from a prompt's arrival to its first token."""
        del steps
        began = time.perf_counter()
        self._add(prompt(tokens), 1)
        self._run()
        return time.perf_counter() - began

    def decode(self, batch: int, steps: int) -> float:
        """Seconds from the moment when every sequence has its first token to that when each has `steps` more."""
        for index in range(batch):
            self._add(prompt(CONTEXT, index), 1 + steps)
        started: set[str] = set()
        while len(started) < batch:
            started |= self._step()
        began = time.perf_counter()
        self._run()
        return time.perf_counter() - began

    def _add(self, tokens: list[int], answer: int) -> None:
        parameters = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(next(self._names)), {"prompt_token_ids": tokens}, parameters)

    def _step(self) -> set[str]:
        return {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}

    def _run(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    engine = Engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        seconds = getattr(engine, order["phase"])(order["size"], order["steps"])
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
