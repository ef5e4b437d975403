"""FlashInfer's attention gives the logits that plain torch gives on the same GPU, in bfloat16."""

import importlib.util

from kvferry_engine.attention.choice import Wanted

from gpu_checks import DEVICE, Skip, must
from gpu_checks.models import KINDS, Sequences, folder, prompts

STEPS = 12
CLOSE = 0.05
"""Of the largest logit of a row: what rounding to bfloat16, in another order, may make."""


def run() -> str:
    if importlib.util.find_spec("flashinfer") is None:
        msg = "flashinfer is not installed: pip install -e '.[cuda]'"
        raise Skip(msg)
    worst = max(compare(kind) for kind in KINDS)
    return f"logits of {', '.join(KINDS)} within {worst:.3f} of the largest of plain torch's"


def compare(kind: str) -> float:
    """Prefill and decode the same tokens both ways; the largest difference, relative to its row."""
    texts = prompts(199)
    with folder(kind) as path:
        names: tuple[Wanted, Wanted] = ("torch", "flashinfer")
        ways = [Sequences(path, "bfloat16", DEVICE, texts, room=STEPS, attention=name) for name in names]
    worst = 0.0
    for step in range(STEPS):
        plain, fast = (way.step() for way in ways)
        must(plain.keys() == fast.keys(), f"{kind}: other sequences have ended")
        for index, row in plain.items():
            error = float((fast[index] - row).abs().max() / row.abs().max())
            must(error < CLOSE, f"{kind}: sequence {index} is off by {error:.3f} in step {step}")
            worst = max(worst, error)
            for way in ways:
                way.texts[index].append(int(row.argmax()))
    for way in ways:
        way.close()
    return worst
