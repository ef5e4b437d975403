"""DeepSeek-V3 and R1: latent attention, many small experts with one shared by all tokens, and a layer that drafts.

The first layers keep a plain MLP. Experts are scored one by one with a sigmoid and chosen within the best groups.
"""

import torch

from kvferry_engine.attention import AttentionBackend, LatentPlan
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import BatchError
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models.base import OnLayer
from kvferry_engine.models.decoder import DecoderModel
from kvferry_engine.models.experts import Experts, SharedExperts, SigmoidRouter
from kvferry_engine.models.layers import DecoderLayer, FeedForward, GatedMlp
from kvferry_engine.models.mla import LatentAttention
from kvferry_engine.models.mtp import DraftLayer, ahead
from kvferry_engine.shard import ALONE, Shard


class DeepseekV3(DecoderModel):
    """DeepseekV3ForCausalLM."""

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
        self.drafter = self._build_drafter(config.layers) if config.draft_layers else None

    def build_layer(self, index: int, prefix: str) -> DecoderLayer:
        """Latent attention, then the layer's experts or MLP."""
        return self._layer(index, prefix, LatentAttention(self.config, self.parameters, f"{prefix}.self_attn"))

    def plan(self, batch: ForwardBatch, pool: KVPool) -> LatentPlan:
        """Plan a step's attention."""
        return self.attention.plan_latent(batch, pool)

    def draft(self, batch: ForwardBatch, hidden: torch.Tensor, pool: KVPool) -> torch.Tensor:
        """See `Model.draft`."""
        drafter = self._check_draft(batch, hidden, pool)
        with torch.inference_mode():
            tokens, turn = self._at(batch)
            return drafter(tokens, hidden, turn, self.plan(batch, pool))[batch.logit_rows]

    def _forward(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.drafter is None:
            return super()._forward(batch, pool, on_layer, rows)
        x = self._attend(batch, pool, on_layer)
        further = ahead(batch)
        if further is None:
            hidden = None if rows is None else self._finish(x[rows])
        else:
            every = self._finish(x)
            tokens, turn = self._at(further[0])
            self.drafter.keep(tokens, every[further[1]], turn, self.plan(further[0], pool))
            self._meet()
            hidden = None if rows is None else every[rows]
        on_layer(self.drafter.index)
        return hidden

    def _meet(self) -> None:
        """Wait until all ranks have come here: no sum over the ranks follows what the drafting layer keeps."""
        if self.shard.group is not None:
            self.shard.group.all_reduce(torch.zeros(1, device=self.device))

    def _at(self, batch: ForwardBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Embeddings of a batch's tokens, [T, E], and the turn of its positions."""
        return self.embedding(batch.tokens), self.rope.at(batch.positions)

    def _check_draft(self, batch: ForwardBatch, hidden: torch.Tensor, pool: KVPool) -> DraftLayer:
        if self.drafter is None:
            msg = "this model has no drafting layer"
            raise ValueError(msg)
        if hidden.shape != (batch.token_count, self.config.hidden_size):
            msg = f"{batch.token_count} tokens are drafted from, the hidden states are {list(hidden.shape)}"
            raise BatchError(msg)
        self.check(batch, pool)
        return self.drafter

    def _build_drafter(self, index: int) -> DraftLayer:
        prefix = f"model.layers.{index}"
        attention = LatentAttention(self.config, self.parameters, f"{prefix}.self_attn")
        layer = self._layer(index, prefix, attention)
        return DraftLayer(self.config, self.parameters, index, layer, attention)

    def _layer(self, index: int, prefix: str, attention: LatentAttention) -> DecoderLayer:
        feed_forward = self._feed_forward(index, f"{prefix}.mlp")
        return DecoderLayer(self.config, self.parameters, prefix, attention=attention, feed_forward=feed_forward)

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        config, parameters, experts = self.config, self.parameters, self.config.experts
        if experts is None or index in experts.dense_layers:
            return GatedMlp.dense(config, parameters, prefix)
        router = SigmoidRouter(experts, parameters, f"{prefix}.gate", config.hidden_size)
        chosen = Experts(experts, parameters, f"{prefix}.experts", config.hidden_size, router)
        if not experts.shared_size:
            return chosen
        shared = GatedMlp.of_size(config, parameters, f"{prefix}.shared_experts", experts.shared_size)
        return SharedExperts(chosen, shared)
