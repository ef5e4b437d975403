"""The frame of a decoder-only model: embedding, layers over the residual stream, final norm and head."""

from abc import abstractmethod
from typing import Any

import torch

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.kernel_layers import Ends
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models.base import Model, OnLayer, ignore
from kvferry_engine.models.dense_stack import DenseStack
from kvferry_engine.models.layers import DecoderLayer
from kvferry_engine.models.rope import Rope
from kvferry_engine.models.vocabulary import Embedding, Head
from kvferry_engine.shard import ALONE, Shard


class DecoderModel(Model):
    """A stack of decoder layers; an architecture says what its layers are made of."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        shard: Shard = ALONE,
    ) -> None:
        super().__init__(config, attention, dtype=dtype, device=device, shard=shard)
        if config.hidden_act != "silu":
            msg = f"{config.architecture} with activation {config.hidden_act!r} is not supported; supported is silu"
            raise ModelError(msg)
        parameters = self.parameters
        self.embedding = Embedding(parameters, "model.embed_tokens.weight", config)
        self.layers = [self.build_layer(index, f"model.layers.{index}") for index in range(config.layers)]
        self.norm = parameters.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        head = self.embedding if config.tie_word_embeddings else Embedding(parameters, "lm_head.weight", config)
        self.head = Head(head)
        self.rope = Rope(config.rope, config.rope_dim, config.max_positions, dtype, device)
        ends = Ends(self.embedding.table, self.norm.weight, self.head.table, self.rope.cos, self.rope.sin)
        self._stack = DenseStack.of(self.layers, ends, config)

    @abstractmethod
    def build_layer(self, index: int, prefix: str) -> DecoderLayer:
        """Allocate layer `index`, whose tensors' names begin with `prefix`."""

    def score(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits after hidden states [rows, E]: float32 [rows, vocabulary], and None on all ranks but the first."""
        with torch.inference_mode():
            return self.head(hidden)

    def plan(self, batch: ForwardBatch, pool: KVPool) -> Any:  # noqa: ANN401 - what the model's attention runs
        """Plan a step's attention."""
        return self.attention.plan(batch, pool)

    def _logits(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        stack, every = self._stack, rows is not None and len(rows) == batch.token_count
        if stack is not None and on_layer is ignore and every and stack.few(batch.token_count):
            plan = self.plan(batch, pool)
            if stack.takes(batch.token_count, plan):
                return stack.score(batch.tokens, batch.positions, plan)
        return super()._logits(batch, pool, on_layer, rows)

    def _forward(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        x = self._attend(batch, pool, on_layer)
        # Nothing reads the last layer's other rows: the cache is written, and only these tokens are asked about.
        return None if rows is None else self._finish(x[rows])

    def _attend(self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer) -> torch.Tensor:
        """Run all but the last layer's feed-forward; returns x [T, E]."""
        plan = self.plan(batch, pool)
        x = self.embedding(batch.tokens)  # [T, E]
        stack = self._stack
        if stack is not None and stack.takes(len(x), plan):
            stack.attend(x, batch.positions, plan, on_layer)
            return x
        turn = self.rope.at(batch.positions)
        for index, layer in enumerate(self.layers):
            x = layer.attend(index, x, turn, plan)
            on_layer(index)
            if index + 1 < len(self.layers):
                x = layer.feed_forward(x)
        return x

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        """Last feed-forward and final norm of rows of x [rows, E], which are the caller's no more."""
        if self._stack is None or not self._stack.few(len(x)):
            return self.norm(self.layers[-1].feed_forward(x))
        self._stack.finish(x)
        return self.norm(x)
