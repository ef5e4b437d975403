"""Llama: pre-norm decoder layers of rotary grouped-query attention and a gated MLP."""

from kvferry_engine.models.decoder import DecoderModel
from kvferry_engine.models.layers import DecoderLayer, GatedMlp, GroupedQueryAttention


class Llama(DecoderModel):
    """LlamaForCausalLM."""

    def build_layer(self, index: int, prefix: str) -> DecoderLayer:  # noqa: ARG002 - all layers are alike
        """Attention, then the MLP."""
        config, parameters = self.config, self.parameters
        return DecoderLayer(
            config,
            parameters,
            prefix,
            attention=GroupedQueryAttention(config, parameters, f"{prefix}.self_attn"),
            feed_forward=GatedMlp.dense(config, parameters, f"{prefix}.mlp"),
        )
