"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all layers but those that the configuration keeps dense.

A softmax over all experts picks k for each token; there is no shared expert.
"""

from kvferry_engine.models.experts import Experts, SoftmaxRouter
from kvferry_engine.models.layers import FeedForward
from kvferry_engine.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM."""

    def build_feed_forward(self, index: int, prefix: str) -> FeedForward:
        """Allocate the layer's router and experts, or its dense MLP."""
        config = self.config.experts
        if config is None or index in config.dense_layers:
            return super().build_feed_forward(index, prefix)
        router = SoftmaxRouter(config, self.parameters, f"{prefix}.gate", self.config.hidden_size)
        return Experts(config, self.parameters, f"{prefix}.experts", self.config.hidden_size, router)
