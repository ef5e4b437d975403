"""Every architecture answers on the GPU, in float32, with the tokens that it answers with on the processor."""

import torch

from gpu_checks import DEVICE, must
from gpu_checks.models import KINDS, Answer, answers, folder, prompts

COUNT = 24
CLOSE = 1e-3
"""Margin of two logits below which either token is right; what follows is then no comparison any more."""


def equal_tokens(ours: Answer, theirs: Answer, what: str) -> int:
    """How many tokens are equal, until two logits are so close that either is right."""
    for place, ((token, margin), (other, _)) in enumerate(zip(ours, theirs, strict=True)):
        if token != other:
            must(margin < CLOSE, f"{what} differs at token {place}: {token} and {other}")
            return place
    return len(ours)


def run() -> str:
    torch.set_float32_matmul_precision("highest")
    compared = 0
    for kind in KINDS:
        with folder(kind) as path:
            texts = prompts(199)
            right, found = (answers(path, "float32", device, texts, COUNT) for device in ("cpu", DEVICE))
        for prompt, (ours, theirs) in enumerate(zip(right, found, strict=True)):
            compared += equal_tokens(ours, theirs, f"{kind}: prompt {prompt}")
    must(compared > len(KINDS) * COUNT, f"only {compared} tokens could be compared")
    return f"{compared} tokens of {', '.join(KINDS)} equal the processor's"
