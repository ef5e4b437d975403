import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvferry_engine.penalties import LogitBias, Penalties, TokenCounts
from kvferry_engine.sampler import BROKEN, CANDIDATES, SamplingBatch, SamplingRow, sample, uniform_numbers

VOCABULARY = 50
SEEN = TokenCounts([1, 2, 3], [3, 4, 4]).seen()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(rows, vocabulary=VOCABULARY, seed=0, spread=2.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits, rows):
    return sample(logits, SamplingBatch.build(rows)).tokens.tolist()


def kept_by_reference(logits, temperature, top_k, top_p, min_p=0.0):
    """Support and probabilities, computed token by token in float64."""
    weights = np.exp((logits - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    order = np.argsort(-probabilities, kind="stable")
    if top_k:
        order = order[:top_k]
    mass, kept = 0.0, []
    for token in order:
        kept.append(token)
        mass += probabilities[token]
        if top_p < 1 and mass >= top_p * probabilities[order].sum():
            break
    kept = [token for token in kept if probabilities[token] >= min_p * probabilities[order[0]]]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def test_greedy_is_argmax():
    logits = logits_of(6)
    assert draw(logits, [SamplingRow()] * 6) == logits.argmax(-1).tolist()


def test_a_tiny_temperature_is_greedy():
    logits = logits_of(2)
    assert draw(logits, [SamplingRow(temperature=1e-9)] * 2) == logits.argmax(-1).tolist()


def test_top_k_one_is_greedy_at_any_temperature():
    logits = logits_of(20)
    rows = [SamplingRow(temperature=5.0, top_k=1, seed=seed) for seed in range(20)]
    assert draw(logits, rows) == logits.argmax(-1).tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3.0),
    top_k=st.one_of(st.just(0), st.integers(1, VOCABULARY + 10)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_draws_invert_the_reference_distribution(seed, temperature, top_k, top_p, min_p):
    """Every number falls on the token whose slice of the reference's distribution it lies in."""
    logits = logits_of(1, seed=seed)
    reference = kept_by_reference(logits[0].double().numpy(), temperature, top_k, top_p, min_p).cumsum()
    rows = [SamplingRow(temperature, top_k, top_p, min_p, seed=seed, position=position) for position in range(40)]
    numbers = uniform_numbers([seed] * 40, range(40))
    tokens = draw(logits.expand(40, -1), rows)
    for number, token in zip(numbers, tokens, strict=True):
        low = reference[token - 1] if token else 0.0
        assert low - 1e-5 <= number <= reference[token] + 1e-5
        assert reference[token] > low


def test_a_flat_distribution_needs_more_than_the_first_candidates():
    logits = logits_of(1, vocabulary=4 * CANDIDATES, spread=0.01)
    reference = kept_by_reference(logits[0].double().numpy(), 1.0, 0, 0.9)
    rows = [SamplingRow(temperature=1.0, top_p=0.9, seed=seed) for seed in range(400)]
    tokens = draw(logits.expand(400, -1), rows)
    least = reference[reference > 0].min()
    assert all(reference[token] > 0 or abs(reference[token] - least) < 1e-9 for token in tokens)
    by_rank = np.argsort(np.argsort(-logits[0].numpy()))
    assert max(by_rank[token] for token in tokens) > 2 * CANDIDATES


def test_ties_with_the_last_of_top_k_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    rows = [SamplingRow(temperature=1.0, top_k=2, seed=seed) for seed in range(300)]
    assert set(draw(logits.expand(300, -1), rows)) == {1, 2, 3, 4}


def test_frequencies_follow_the_distribution():
    draws = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    rows = [SamplingRow(temperature=0.8, top_p=0.95, seed=7, position=position) for position in range(draws)]
    counts = np.bincount(draw(logits.expand(draws, -1), rows), minlength=5)
    expected = kept_by_reference(logits[0].double().numpy(), 0.8, 0, 0.95) * draws
    live = expected > 0
    assert counts[~live].sum() == 0
    # 99.9 % quantile of chi-square with 3 degrees of freedom; seeds are fixed, so this never wavers.
    assert (((counts - expected)[live] ** 2) / expected[live]).sum() < 16.3


def test_a_request_draws_the_same_in_any_batch():
    logits = logits_of(12, seed=3)
    rows = [
        SamplingRow(temperature=t, top_k=k, top_p=p, min_p=m, seed=index * 977, position=index, penalties=penalties)
        for index, (t, k, p, m, penalties) in enumerate(
            [
                (0.7, 0, 1.0, 0.0, None),
                (1.0, 5, 1.0, 0.1, Penalties(bias=LogitBias.of({3: 5.0, 7: -5.0}))),
                (1.3, 0, 0.8, 0.0, Penalties(presence=1.5, repetition=1.3, seen=SEEN)),
                (0.0, 0, 1.0, 0.0, Penalties(frequency=2.0, seen=SEEN)),
            ]
            * 3
        )
    ]
    together = draw(logits, rows)
    alone = [draw(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    order = [5, 2, 11, 0]
    some = draw(logits[order], [rows[index] for index in order])
    assert alone == together
    assert some == [together[index] for index in order]


def test_uniform_numbers_are_uniform_and_do_not_repeat():
    numbers = uniform_numbers([1, 2] * 5000, [index // 2 for index in range(10_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == 10_000
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    # 99.9 % quantile of chi-square with 19 degrees of freedom.
    assert ((counts - 500) ** 2 / 500).sum() < 43.8


def test_numbers_of_one_seed_do_not_shift_into_those_of_the_next():
    first, second = uniform_numbers([5] * 100, range(100)), uniform_numbers([6] * 100, range(100))
    assert not set(first) & set(second)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed):
    assert 0 <= uniform_numbers([seed], [0])[0] < 1


def test_logprobs_are_the_models_own():
    logits = logits_of(4)
    rows = [
        SamplingRow(temperature=2.0, top_k=3, seed=1, logprobs=3),
        SamplingRow(),
        SamplingRow(logprobs=0),
        SamplingRow(temperature=0.5, seed=2, logprobs=20),
    ]
    sampled = sample(logits, SamplingBatch.build(rows))
    expected = logits.log_softmax(-1)
    assert sampled.logprobs[1] is None
    for index, count in ((0, 3), (2, 0), (3, 20)):
        report = sampled.logprobs[index]
        assert report.chosen == pytest.approx(expected[index, sampled.tokens[index]].item())
        best = expected[index].topk(count)
        assert [token for token, _ in report.top] == best.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist())


def test_min_p_is_relative_to_the_likeliest_token():
    logits = torch.tensor([0.5, 0.26, 0.24]).log()[None]
    rows = [SamplingRow(temperature=1.0, min_p=0.5, seed=seed) for seed in range(300)]
    assert set(draw(logits.expand(300, -1), rows)) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_break_one_row_alone(temperature, bad):
    logits = logits_of(3)
    logits[1, 4] = bad
    rows = [SamplingRow(temperature=temperature, seed=3, top_p=0.9, logprobs=1)] * 3
    sampled = sample(logits, SamplingBatch.build(rows))
    alone = draw(logits[2:], rows[2:])
    assert sampled.tokens[1] == BROKEN
    assert sampled.logprobs[1] is None
    assert sampled.tokens[2] == alone[0]


def test_forbidden_tokens_are_never_drawn():
    logits = logits_of(1)
    logits[0, 10:] = float("-inf")
    rows = [SamplingRow(temperature=3.0, seed=seed) for seed in range(300)]
    assert set(draw(logits.expand(300, -1), rows)) <= set(range(10))


def test_rows_must_match():
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(logits_of(2), SamplingBatch.build([SamplingRow()]))


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.1},
        {"logprobs": 21},
    ],
)
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        SamplingRow(**field)
