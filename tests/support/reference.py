"""The reference implementation's greedy answers, and how ours are held to them."""

import random
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-3
"""Where the two best logits are closer than this, either token is right; what follows is another text."""

_SUBJECTS = ["The ferry", "A small boat", "My neighbour", "The old harbour", "Our captain", "A letter from 1897"]
_VERBS = ["carries", "remembers", "counts", "repairs", "describes", "follows"]
_OBJECTS = ["12 crates of oranges", "the tide tables", "a map of the islands", "every lighthouse", "three dogs"]


def passage(words, seed=0):
    """English of about so many words, the same for the same seed."""
    draw = random.Random(seed)
    sentences = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        sentences.append(f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}.")
    return " ".join(sentences)


@dataclass
class Answer:
    tokens: list[int]
    runners_up: list[int]
    margins: list[float]


class Reference:
    """transformers on the same folder, in float32."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.known = {}

    def answer(self, prompt, tokens):
        """Greedy answer of up to `tokens` tokens, with the margin of each; computed once."""
        asked = (tokens, *prompt)
        if asked not in self.known:
            self.known[asked] = self._answer(prompt, tokens)
        return self.known[asked]

    def _answer(self, prompt, tokens):
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
                max_new_tokens=tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = [step[0].float().topk(2) for step in output.logits]
        return Answer(
            tokens=output.sequences[0, len(prompt) :].tolist(),
            runners_up=[int(step.indices[1]) for step in best],
            margins=[float(step.values[0] - step.values[1]) for step in best],
        )

    def check(self, prompt, ours, tokens):
        """Assert that `ours` is the reference's answer, up to the first near tie."""
        theirs = self.answer(prompt, tokens)
        for index, (mine, reference) in enumerate(zip(ours, theirs.tokens, strict=False)):
            if mine == reference:
                continue
            tie = theirs.margins[index] < MARGIN and mine == theirs.runners_up[index]
            assert tie, f"{len(prompt)} tokens: token {index} is {mine}, the reference has {reference}"
            return
        assert len(ours) == len(theirs.tokens), f"{len(ours)} tokens, the reference has {len(theirs.tokens)}"
