"""Sampling: one token per row of logits, the same for a request in whatever batch, and wherever, it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry_engine.grammar import TokenMasks
from kvferry_engine.penalties import LogitChanges, Penalties

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow float32."""
CANDIDATES = 1024
"""Tokens looked at first for top_p; nearly always they hold its mass, and a whole sort costs ten times as much."""
BROKEN = -1
"""Token of a row whose largest logit is not a finite number."""


@dataclass(frozen=True)
class SamplingRow:
    """How one sequence samples its next token."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens (and any that tie with the last of them); 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities first reach this sum; 1 keeps all."""
    min_p: float = 0.0
    """Keep, of those that top_k and top_p leave, the tokens at least this fraction as likely as the likeliest one."""
    seed: int = 0
    position: int = 0
    """Position of the token to be sampled in its sequence: with the seed, it names the row's random number."""
    logprobs: int | None = None
    """None for no log-probabilities, else how many of the most likely tokens to report beside the chosen one."""
    penalties: Penalties | None = None
    """What changes the logits beforehand."""

    def __post_init__(self) -> None:
        limits = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
        }
        for name, good in limits.items():
            if not good:
                msg = f"{name} {getattr(self, name)} is out of range"
                raise ValueError(msg)

    @property
    def greedy(self) -> bool:
        """Whether the row takes the most likely token, without a random number."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Draws:
    """The rows of a step that draw a random number, as arrays over them."""

    rows: torch.Tensor
    """Their indices among the step's, int64 [R]."""
    temperature: torch.Tensor
    """float32 [R, 1]."""
    top_k: torch.Tensor
    """int64 [R]; the vocabulary is the limit."""
    top_p: torch.Tensor
    """float64 [R]."""
    min_p: torch.Tensor
    """float32 [R]."""
    uniform: torch.Tensor
    """Random numbers in [0, 1), float64 [R]."""

    @classmethod
    def build(cls, rows: Sequence[SamplingRow]) -> "Draws | None":
        """Gather those of `rows` that are not greedy; None where all are."""
        drawn = [index for index, row in enumerate(rows) if not row.greedy]
        if not drawn:
            return None
        chosen = [rows[index] for index in drawn]
        return cls(
            rows=torch.tensor(drawn, dtype=torch.int64),
            temperature=torch.tensor([[row.temperature] for row in chosen], dtype=torch.float32),
            top_k=torch.tensor([row.top_k for row in chosen], dtype=torch.int64),
            top_p=torch.tensor([row.top_p for row in chosen], dtype=torch.float64),
            min_p=torch.tensor([row.min_p for row in chosen], dtype=torch.float32),
            uniform=torch.from_numpy(uniform_numbers([row.seed for row in chosen], [row.position for row in chosen])),
        )

    def to(self, device: torch.device) -> "Draws":
        """Return the same beside the logits."""
        return Draws(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class SamplingBatch:
    """Rows of one step."""

    rows: tuple[SamplingRow, ...]
    draws: Draws | None
    """None when all rows are greedy."""
    changes: LogitChanges | None
    """Penalties and biases of all rows; None when no row has any."""

    @classmethod
    def build(cls, rows: Sequence[SamplingRow]) -> "SamplingBatch":
        """Gather the rows of a step, in the order of its logits."""
        return cls(tuple(rows), Draws.build(rows), LogitChanges.build([row.penalties for row in rows]))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the model itself: no setting of the row changes them."""

    chosen: float
    top: list[tuple[int, float]]
    """Most likely tokens, most likely first."""


@dataclass(frozen=True)
class Sampled:
    """What a step's rows drew."""

    tokens: torch.Tensor
    """int64 [B] on the host; BROKEN (-1) where the logits are not numbers: the caller fails that request alone."""
    logprobs: list[TokenLogprobs | None]
    """One entry per row; None for rows that did not ask, or are broken."""


def sample(logits: torch.Tensor, batch: SamplingBatch, masks: TokenMasks | None = None) -> Sampled:
    """Draw one token per row of float32 `logits` [B, V], none that `masks` forbid.

    Raises ValueError unless B is the batch's.
    """
    if len(logits) != len(batch.rows):
        msg = f"{len(logits)} rows of logits for {len(batch.rows)} sampling rows"
        raise ValueError(msg)
    with torch.inference_mode():
        changed = logits if batch.changes is None else batch.changes.apply(logits)
        changed = changed if masks is None else masks.apply(changed)
        tokens, sound = _most_likely(changed)
        if batch.draws is not None:
            draws = batch.draws.to(logits.device)
            rows = changed if len(draws.rows) == len(changed) else changed[draws.rows]
            tokens[draws.rows] = _draw(rows, draws)
        tokens.masked_fill_(~sound, BROKEN)
        return Sampled(tokens=tokens.cpu(), logprobs=_logprobs(logits, tokens.tolist(), batch.rows))


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one for each pair of seed and position: a hash, so nothing has to be carried along."""
    keys = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    counters = np.array([position & 0xFFFF_FFFF_FFFF_FFFF for position in positions], dtype=np.uint64)
    mixed = _mix(_mix(keys) + counters)
    # A double has 53 bits: more would round up to 1.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of splitmix64."""
    z = state + np.uint64(0x9E37_79B9_7F4A_7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Most likely token of each row, int64 [B], and whether its logit is a finite number, bool [B]."""
    if logits.device.type != "cpu":
        best, tokens = logits.max(dim=-1)
        return tokens, best.isfinite()
    values = logits.numpy()
    ids = values.argmax(axis=-1)  # torch takes 30 times as long, 130 us a row
    return torch.from_numpy(ids), torch.from_numpy(np.isfinite(values[np.arange(len(ids)), ids]))


def _draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Walk each row's distribution in the order of the vocabulary up to its random number; int64 [R]."""
    probabilities = (logits / draws.temperature).softmax(dim=-1)
    least = _least_kept(probabilities, draws)
    if least is not None:
        probabilities = probabilities.masked_fill_(probabilities < least, 0)
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:]
    # Below the total even after rounding, and landing strictly beyond it: never on a token of probability 0.
    target = torch.minimum(draws.uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(reached, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def _least_kept(probabilities: torch.Tensor, draws: Draws) -> torch.Tensor | None:
    """Least probability that each row keeps, [R, 1]; None when all keep everything.

    A threshold, not a rank: ties do not depend on a sort's order.
    """
    least = None
    if (((draws.top_k > 0) & (draws.top_k < probabilities.shape[-1])) | (draws.top_p < 1)).any():
        least = _thresholds(probabilities, draws)
    if (draws.min_p > 0).any():
        relative = probabilities.amax(dim=-1, keepdim=True) * draws.min_p.unsqueeze(-1)
        least = relative if least is None else torch.maximum(least, relative)
    return least


def _thresholds(probabilities: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Least probability that top_k and top_p keep in each row, [R, 1]."""
    vocabulary = probabilities.shape[-1]
    top_k = torch.where(draws.top_k > 0, draws.top_k, vocabulary).clamp_(max=vocabulary)
    looked_at = min(vocabulary, max(CANDIDATES, int(torch.where(top_k < vocabulary, top_k, 0).max())))
    thresholds, found = _thresholds_among(probabilities, top_k, draws.top_p, looked_at)
    if not found:
        thresholds, _ = _thresholds_among(probabilities, top_k, draws.top_p, vocabulary)
    return thresholds


def _thresholds_among(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, looked_at: int
) -> tuple[torch.Tensor, bool]:
    """Thresholds from the `looked_at` largest probabilities, and whether those were enough."""
    largest = probabilities.topk(looked_at, dim=-1).values
    by_rank = largest.gather(-1, (top_k.clamp(max=looked_at) - 1).unsqueeze(-1))
    by_rank = torch.where((top_k == probabilities.shape[-1]).unsqueeze(-1), 0, by_rank)
    kept = torch.where(probabilities >= by_rank, probabilities, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    reached = largest.cumsum(dim=-1, dtype=torch.float64) >= kept * top_p.unsqueeze(-1)
    rank = reached.int().argmax(dim=-1, keepdim=True)
    by_mass = torch.where(top_p.unsqueeze(-1) < 1, largest.gather(-1, rank), 0)
    enough = reached.any(dim=-1) | (top_p >= 1) | (looked_at == probabilities.shape[-1])
    return torch.maximum(by_rank, by_mass), bool(enough.all())


def _logprobs(logits: torch.Tensor, tokens: list[int], rows: Sequence[SamplingRow]) -> list[TokenLogprobs | None]:
    asked = [index for index, row in enumerate(rows) if row.logprobs is not None and tokens[index] != BROKEN]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if not asked:
        return result
    values = logits[asked].log_softmax(dim=-1)
    chosen = values.gather(-1, torch.tensor([[tokens[index]] for index in asked], device=values.device)).squeeze(-1)
    top = values.topk(min(values.shape[-1], max(rows[index].logprobs or 0 for index in asked)), dim=-1)
    for index, value, ids, best in zip(asked, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True):
        pairs = list(zip(ids, best, strict=True))[: rows[index].logprobs]
        result[index] = TokenLogprobs(chosen=value, top=pairs)
    return result
