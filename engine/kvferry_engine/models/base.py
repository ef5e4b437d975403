"""What the services may ask of any model, whatever its architecture."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from kvferry_proto.layout import KVLayout

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.config import ModelConfig
from kvferry_engine.dtypes import dtype_name
from kvferry_engine.errors import BatchError
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.kv_size import kv_layout
from kvferry_engine.models.parameters import Parameters
from kvferry_engine.shard import ALONE, Shard

OnLayer = Callable[[int], None]


class Model(ABC):
    """One rank's share of a language model over a paged KV cache; its weights are filled by `load_model`."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        shard: Shard = ALONE,
    ) -> None:
        self.config = config
        self.attention = attention
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.parameters = Parameters(dtype, device, shard)

    @property
    def drafts(self) -> bool:
        """Whether it has a layer that drafts."""
        return self.config.draft_layers > 0

    @property
    def kv_layers(self) -> int:
        """Layers that keep something of every token: the model's own, and after them those that draft."""
        return self.config.layers + self.config.draft_layers

    def kv_layout(self, page_size: int) -> KVLayout:
        """Layout of a KV cache for this model, in the dtype of its weights, over all ranks."""
        return kv_layout(self.config, dtype=dtype_name(self.dtype), page_size=page_size, ranks=self.shard.ranks)

    def forward(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer | None = None, *, logits: bool = True
    ) -> torch.Tensor | None:
        """Run the batch: its keys and values go to the pool. All ranks of a node run the same batch together.

        Returns the logits, float32 [tokens after which they are wanted, vocabulary], sequence after sequence, or
        None when no sequence wants any or `logits` is false, and on all ranks but the first. `on_layer(l)`
        is called when layer l's output projection is done, so its keys and values are in the pools of all ranks.
        Raises BatchError when the batch does not fit the model or the pool. Not to be run by two threads at once.
        """
        self.check(batch, pool)
        rows = batch.logit_rows if logits and batch.wants_logits else None
        with torch.inference_mode():
            return self._logits(batch, pool, on_layer or ignore, rows)

    def hidden_states(
        self, batch: ForwardBatch, pool: KVPool, rows: torch.Tensor, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Run the batch as `forward` does; returns the hidden states of `rows`, int64 indices among its T tokens.

        They are [rows, E], after the final norm: what `score` makes logits of, and what a draft starts from. So any
        tokens of a sequence can be judged at once.
        """
        self.check(batch, pool)
        with torch.inference_mode():
            hidden = self._forward(batch, pool, on_layer or ignore, rows)
        assert hidden is not None
        return hidden

    @abstractmethod
    def score(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits after hidden states [rows, E]: float32 [rows, vocabulary], and None on all ranks but the first."""

    def draft(self, batch: ForwardBatch, hidden: torch.Tensor, pool: KVPool) -> torch.Tensor:  # noqa: ARG002
        """Guess further: `batch` has at position p the token p + 1, `hidden` [T, E] the state of p.

        Returns [tokens after which logits are wanted, E]: what `score` makes the logits of token p + 2 of, and the
        hidden state to draft from once more. All positions before p must have been drafted from, or run by `forward`
        with their next token known. Raises BatchError; ValueError without a drafting layer.
        """
        msg = "this model has no drafting layer"
        raise ValueError(msg)

    def _logits(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Logits after `rows`; None where `rows` is, and on all ranks but the first."""
        hidden = self._forward(batch, pool, on_layer, rows)
        return None if hidden is None else self.score(hidden)

    @abstractmethod
    def _forward(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Hidden states of `rows`, [rows, E] after the final norm; None where `rows` is."""

    def check(self, batch: ForwardBatch, pool: KVPool) -> None:
        """Raise BatchError when the batch does not fit the model or the pool."""
        layout, config = pool.layout, self.config
        heads = self.shard.kv_heads(config).size
        mine = (self.kv_layers, heads, config.head_dim, dtype_name(self.dtype), batch.page_size)
        theirs = (layout.layers, layout.heads_per_rank, layout.head_dim, layout.dtype, layout.page_size)
        if mine != theirs or layout.latent != (config.latent is not None):
            msg = f"the pool's (layers, KV heads, head dim, dtype, page size) are {theirs}, the model's step has {mine}"
            msg += f"; latents: {layout.latent} and {config.latent is not None}"
            raise BatchError(msg)
        batch.check_fits(vocab_size=config.vocab_size, max_positions=config.max_positions, pages=pool.pages)


def ignore(_layer: int) -> None:
    """What `on_layer` is where nobody asks for it."""
