import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_engine.penalties import FIRST_ROOM, LogitBias, LogitChanges, Penalties, TokenCounts
from kvferry_engine.sampler import BROKEN, SamplingBatch, SamplingRow, sample

VOCABULARY = 20
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def changed_by_reference(logits, *, prompt, generated, presence, frequency, repetition, bias):
    """One token after the other, in float64."""
    result = logits.double().tolist()
    for token in range(VOCABULARY):
        count = generated.count(token)
        if count or token in prompt:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * count + (presence if count else 0.0) - bias.get(token, 0.0)
    return result


penalised = st.fixed_dictionaries(
    {
        "prompt": ids,
        "generated": ids,
        "presence": st.floats(-2, 2),
        "frequency": st.floats(-2, 2),
        "repetition": st.floats(0.5, 2),
        "bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=4),
    }
)


def penalties_of(*, prompt, generated, presence, frequency, repetition, bias):
    seen = TokenCounts(prompt, generated).seen()
    return Penalties(presence, frequency, repetition, seen, LogitBias.of(bias) if bias else None)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.none() | penalised, min_size=1, max_size=5), seed=st.integers(0, 100))
def test_every_row_is_changed_as_by_the_reference(rows, seed):
    logits = logits_of(len(rows), seed)
    before = logits.clone()
    changes = LogitChanges.build([row and penalties_of(**row) for row in rows])
    ours = logits if changes is None else changes.apply(logits)
    assert torch.equal(logits, before)
    for index, row in enumerate(rows):
        expected = before[index].tolist() if row is None else changed_by_reference(before[index], **row)
        assert ours[index].tolist() == pytest.approx(expected, abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(prompt=ids, generated=ids)
def test_counts_grow_as_if_counted_anew(prompt, generated):
    counts = TokenCounts(prompt)
    for token in generated:
        counts.add(token)
    seen = counts.seen()
    assert dict(zip(seen.tokens.tolist(), seen.generated.tolist(), strict=True)) == {
        token: generated.count(token) for token in {*prompt, *generated}
    }
    assert len(seen.tokens) == len({*prompt, *generated})
    anew = TokenCounts(prompt, generated).seen()
    assert sorted(zip(*map(np.ndarray.tolist, anew), strict=True)) == sorted(
        zip(*map(np.ndarray.tolist, seen), strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(prompt=ids, generated=ids, further=ids)
def test_counts_as_they_would_be(prompt, generated, further):
    counts = TokenCounts(prompt, generated)
    expected = sorted(zip(*map(np.ndarray.tolist, TokenCounts(prompt, generated + further).seen()), strict=True))
    assert sorted(zip(*map(np.ndarray.tolist, counts.seen(further)), strict=True)) == expected
    for token in further:
        counts.add(token)
    assert sorted(zip(*map(np.ndarray.tolist, counts.seen()), strict=True)) == expected


def test_counts_outgrow_their_first_room():
    counts = TokenCounts([0])
    for token in range(4 * FIRST_ROOM):
        counts.add(token)
        counts.add(0)
    seen = counts.seen()
    assert seen.tokens.tolist() == list(range(4 * FIRST_ROOM))
    assert seen.generated.tolist() == [4 * FIRST_ROOM + 1] + [1] * (4 * FIRST_ROOM - 1)


def test_a_step_keeps_the_counts_it_was_given():
    counts = TokenCounts([1], [2])
    seen = counts.seen()
    counts.add(2)
    assert seen.generated.tolist() == [0, 1]


def test_rows_that_ask_for_nothing_cost_nothing():
    seen = TokenCounts([1], [2]).seen()
    rows = [SamplingRow(), SamplingRow(penalties=Penalties(seen=seen)), SamplingRow(penalties=Penalties())]
    assert SamplingBatch.build(rows).changes is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_is_not_drawn_and_a_demanded_one_is(temperature):
    logits = logits_of(1).expand(100, -1)
    best = int(logits[0].argmax())
    forbid, demand = (Penalties(bias=LogitBias.of({token: value})) for token, value in ((best, -100), (7, 100)))
    rows = [SamplingRow(temperature, seed=seed, penalties=(forbid, demand)[seed % 2]) for seed in range(100)]
    tokens = sample(logits, SamplingBatch.build(rows)).tokens
    assert best not in tokens[::2]
    assert (tokens[1::2] == 7).all()


def test_logprobs_are_the_models_own_whatever_the_penalties():
    logits = logits_of(1)
    bias = LogitBias.of({4: 50.0})
    sampled = sample(logits, SamplingBatch.build([SamplingRow(logprobs=2, penalties=Penalties(bias=bias))]))
    assert sampled.tokens.tolist() == [4]
    assert sampled.logprobs[0].chosen == pytest.approx(logits.log_softmax(-1)[0, 4].item())
    assert [token for token, _ in sampled.logprobs[0].top] == logits[0].topk(2).indices.tolist()


def test_a_token_that_the_vocabulary_lacks_fails_nobody():
    logits = logits_of(2)
    rows = [
        SamplingRow(
            penalties=Penalties(
                presence=1.0,
                repetition=1.5,
                seen=TokenCounts([VOCABULARY], [VOCABULARY + 3]).seen(),
                bias=LogitBias.of({10**9: 5.0, 4: 60.0}),
            )
        ),
        SamplingRow(),
    ]
    assert sample(logits, SamplingBatch.build(rows)).tokens.tolist() == [4, int(logits[1].argmax())]


def test_masked_and_broken_logits_stay_so():
    logits = logits_of(2)
    logits[0, 3] = float("-inf")
    logits[1, 3] = float("nan")
    row = SamplingRow(
        penalties=Penalties(
            repetition=2.0, frequency=-2.0, seen=TokenCounts([3], [3]).seen(), bias=LogitBias.of({3: 100.0})
        )
    )
    tokens = sample(logits, SamplingBatch.build([row, row])).tokens.tolist()
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] == BROKEN


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ({"presence": 2.1}, "presence_penalty"),
        ({"frequency": float("nan")}, "frequency_penalty"),
        ({"repetition": 0.0}, "repetition_penalty"),
        ({"repetition": 1.1}, "need the counts"),
        ({"presence": 0.1}, "need the counts"),
    ],
)
def test_penalties_out_of_range_are_refused(field, what):
    with pytest.raises(ValueError, match=what):
        Penalties(**field)


@pytest.mark.parametrize("bias", [{-1: 0.0}, {3: 101.0}, {3: float("nan")}])
def test_biases_out_of_range_are_refused(bias):
    with pytest.raises(ValueError, match="logit_bias"):
        LogitBias.of(bias)
