"""Experts run group by group, against one token and one expert at a time in float64."""

import pytest
import torch
from kvferry_engine.experts_config import ExpertsConfig
from kvferry_engine.models.experts import Experts, SoftmaxRouter
from kvferry_engine.models.parameters import Parameters
from torch.nn import functional

HIDDEN, SIZE, COUNT = 32, 24, 7


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(per_token=3, *, normalise=True, dtype=torch.float32, router=None):
    parameters = Parameters(dtype, "cpu")
    config = ExpertsConfig(COUNT, per_token, SIZE, normalise)
    router = router or SoftmaxRouter(config, parameters, "gate", HIDDEN)
    experts = Experts(config, parameters, "experts", HIDDEN, router)
    generator = torch.Generator().manual_seed(1)
    for target in parameters.targets.values():
        target.copy_(torch.randn(target.shape, generator=generator) * 0.3)
    return experts, {name: target.double() for name, target in parameters.targets.items()}


def tokens(count, dtype=torch.float32):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def answer(weights, index, x):
    gate, up, down = (weights[f"experts.{index}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return down @ (functional.silu(gate @ x) * (up @ x))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("per_token", [1, 3, COUNT])
@pytest.mark.parametrize("count", [1, 2, 40, 300])
def test_each_token_gets_the_weighted_sum_of_its_experts(count, per_token, normalise):
    experts, weights = build(per_token, normalise=normalise)
    x = tokens(count)
    ours = experts(x)
    for row in {0, count // 2, count - 1}:
        probabilities = (weights["gate.weight"] @ x[row].double()).softmax(-1)
        best = probabilities.topk(per_token)
        total = best.values.sum() if normalise else 1.0
        expected = sum(
            value / total * answer(weights, index, x[row].double())
            for index, value in zip(best.indices.tolist(), best.values, strict=True)
        )
        torch.testing.assert_close(ours[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_token_is_the_same_whoever_else_is_there():
    experts, _ = build()
    x = tokens(50)
    torch.testing.assert_close(experts(x)[[4, 30]], torch.cat((experts(x[4:5]), experts(x[30:31]))))


@pytest.mark.parametrize("chosen", [0, COUNT - 1])
def test_all_tokens_to_one_expert(chosen):
    experts, weights = build(1, router=lambda x: (torch.full((len(x), 1), 0.5), torch.full((len(x), 1), chosen)))
    x = tokens(20)
    expected = torch.stack([0.5 * answer(weights, chosen, row) for row in x.double()])
    torch.testing.assert_close(experts(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_an_expert_runs_once_per_step_and_only_if_it_is_needed():
    experts, _ = build(1, router=lambda x: (torch.ones(len(x), 1), torch.arange(len(x))[:, None] % 2 * 3))
    calls = []
    experts.experts = [
        lambda rows, index=index, run=run: (calls.append((index, len(rows))), run(rows))[1]
        for index, run in enumerate(experts.experts)
    ]
    experts(tokens(9))
    assert calls == [(0, 5), (3, 4)]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_bfloat16_is_close(count):
    """Routed as in float32: near ties would go either way."""
    chosen = torch.stack([torch.randperm(COUNT, generator=torch.Generator().manual_seed(row))[:3] for row in range(60)])

    def router(x):
        return torch.full((len(x), 3), 0.25, dtype=x.dtype), chosen[: len(x)]

    narrow, weights = build(router=router, dtype=torch.bfloat16)
    x = tokens(count, torch.bfloat16)
    ours = narrow(x)
    assert ours.dtype == torch.bfloat16
    for row in range(count):
        expected = sum(0.25 * answer(weights, int(index), x[row].double()) for index in chosen[row])
        assert (ours[row].double() - expected).norm() < 0.02 * expected.norm()
