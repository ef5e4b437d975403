"""What every architecture is held to on a small random model: prefill, mixed batches, greedy answers.

`tiny` is a pair: our model and the reference's, from one folder.
"""

import random

import torch
from engine_runner import Runner, close, reference_logits, tokens_of


def check_prefill(tiny, chunks, page_size):
    """The logits after every chunk of one prompt."""
    model, reference = tiny
    tokens = tokens_of(sum(chunks))
    expected = reference_logits(reference, tokens)
    runner = Runner(model, page_size=page_size, pages=2 + len(tokens) // page_size)
    sequence = runner.sequence(tokens)
    for count in chunks:
        close(runner.step(sequence.next(count))[0], expected[sequence.done - 1])


def check_mixed(tiny, page_size, *, seed=None, lengths=(15, 50), sequences=4, singles=0.3, idle=0.0):
    """Random chunks of random sequences together, some of them single tokens; every row is checked.

    `singles`: how many of the chunks are single tokens; `idle`: how often a sequence sits a step out.
    """
    model, reference = tiny
    dice = random.Random(page_size if seed is None else seed)
    runner = Runner(model, page_size=page_size, pages=80, seed=seed or 0)
    batch = [runner.sequence(tokens_of(dice.randrange(*lengths), seed=index)) for index in range(sequences)]
    expected = [reference_logits(reference, sequence.tokens) for sequence in batch]
    while left := [index for index, each in enumerate(batch) if each.done < len(each.tokens)]:
        running = [index for index in left if dice.random() >= idle]
        if not running:
            continue
        logits = runner.step(*(batch[index].next(_chunk(dice, batch[index], singles)) for index in running))
        for row, index in enumerate(running):
            close(logits[row], expected[index][batch[index].done - 1])


def _chunk(dice, sequence, singles):
    return 1 if dice.random() < singles else dice.randint(1, len(sequence.tokens) - sequence.done)


def check_greedy(tiny, prompts, answer):
    """Token ids of greedy answers, all in one batch, from a prefill in one pass."""
    model, reference = tiny
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=answer, do_sample=False, pad_token_id=0)[0].tolist()
        for prompt in prompts
    ]
    runner = Runner(model)
    sequences = [runner.sequence(prompt, room=answer) for prompt in prompts]
    logits = runner.step(*(sequence.next(len(sequence.tokens)) for sequence in sequences))
    for _ in range(answer):
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
        logits = runner.step(*(sequence.next(1) for sequence in sequences))
    assert [sequence.tokens for sequence in sequences] == expected


def check_last(model, reference, length):
    """The logits after a prompt of so many tokens, in one pass."""
    runner = Runner(model)
    tokens = tokens_of(length)
    close(runner.step(runner.sequence(tokens).next(length))[0], reference_logits(reference, tokens)[-1])
