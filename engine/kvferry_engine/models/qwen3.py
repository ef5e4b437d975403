"""Qwen3: Llama's layers, with each query head and key head normalised before it is turned.

Attention scores then stay bounded whatever the projections do, which is why Qwen3 gave up the biases of its
predecessor. The head dimension is a number of its own, not the hidden size over the heads.
"""

from kvferry_engine.models.decoder import DecoderModel
from kvferry_engine.models.layers import DecoderLayer, FeedForward, GatedMlp, GroupedQueryAttention


class Qwen3(DecoderModel):
    """Qwen3ForCausalLM."""

    def build_layer(self, index: int, prefix: str) -> DecoderLayer:
        """Attention with normalised heads, then the layer's feed-forward."""
        config, parameters = self.config, self.parameters
        return DecoderLayer(
            config,
            parameters,
            prefix,
            attention=GroupedQueryAttention(config, parameters, f"{prefix}.self_attn", normalise_heads=True),
            feed_forward=self.build_feed_forward(index, f"{prefix}.mlp"),
        )

    def build_feed_forward(self, index: int, prefix: str) -> FeedForward:  # noqa: ARG002 - all layers are alike
        """Allocate the gated MLP."""
        return GatedMlp.dense(self.config, self.parameters, prefix)
