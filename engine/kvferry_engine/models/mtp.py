"""Multi-token prediction (MTP): one layer after the last that guesses the token after the next.

It joins the final hidden state of position p with the embedding of token p + 1, passes a decoder layer of its own over
what it has kept of earlier positions, and the model's own head makes of the result the logits of token p + 2. To draft
further, its output takes the place of the hidden state and its guess that of the token.

What it keeps of the pair (hidden state p, token p + 1) lies at position p, in one more layer of the KV cache: it shares
the sequence's pages, and travels with them. A page's last position needs the first token of the next page: where two
prompts share a page and go on differently, it belongs to one of them. That can cost a guess, never an answer, since
the model itself judges every guess.
"""

import torch

from kvferry_engine.attention import LatentPlan
from kvferry_engine.batch import ForwardBatch, SequenceSlice
from kvferry_engine.config import ModelConfig
from kvferry_engine.models.layers import DecoderLayer
from kvferry_engine.models.mla import LatentAttention
from kvferry_engine.models.parameters import Parameters
from kvferry_engine.models.rope import Turn


class DraftLayer:
    """The MTP module; embedding and head are the model's own, of which checkpoints hold copies under its name."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, index: int, layer: DecoderLayer, attention: LatentAttention
    ) -> None:
        prefix, size = f"model.layers.{index}", config.hidden_size
        self.index = index
        self.token_norm = parameters.norm(f"{prefix}.enorm", size, config.rms_norm_eps)
        self.hidden_norm = parameters.norm(f"{prefix}.hnorm", size, config.rms_norm_eps)
        self.join = parameters.linear([(f"{prefix}.eh_proj", size)], 2 * size)
        self.layer = layer
        self.attention = attention
        self.norm = parameters.norm(f"{prefix}.shared_head.norm", size, config.rms_norm_eps)

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, turn: Turn, plan: LatentPlan) -> torch.Tensor:
        """Draft from the embeddings of tokens p + 1 and the hidden states of positions p, [T, E] each; also [T, E]."""
        x = self._joined(tokens, hidden)
        x = self.layer.feed_forward(self.layer.attend(self.index, x, turn, plan))
        return self.norm(x)

    def keep(self, tokens: torch.Tensor, hidden: torch.Tensor, turn: Turn, plan: LatentPlan) -> None:
        """Write what later drafts attend to, and draft nothing."""
        x = self.layer.attention_norm(self._joined(tokens, hidden))
        self.attention.keep(self.index, x, turn, plan)

    def _joined(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.join(torch.cat((self.token_norm(tokens), self.hidden_norm(hidden)), dim=-1))


def ahead(batch: ForwardBatch) -> tuple[ForwardBatch, torch.Tensor] | None:
    """Return the batch whose tokens are each one further, where known, and the indices of their T in `batch`.

    None where no token's next is known.
    """
    slices, rows = [], []
    for piece, first in zip(batch.slices, batch.q_starts.tolist(), strict=True):
        known = [*piece.tokens[1:], *([] if piece.following is None else [piece.following])]
        if known:
            slices.append(SequenceSlice(known, piece.start, piece.pages, want_logits=False))
            rows.append(torch.arange(first, first + len(known)))
    if not slices:
        return None
    return ForwardBatch.build(slices, page_size=batch.page_size, device=batch.device), torch.cat(rows).to(batch.device)
