"""Llama: pre-norm decoder layers of rotary grouped-query attention and a gated MLP.

Shapes: T tokens of the batch, E hidden size, H heads, K KV heads, D head dimension, F intermediate size, V vocabulary.
"""

import torch
from torch.nn import functional

from kvferry_engine.attention import AttentionBackend, AttentionPlan
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError
from kvferry_engine.kv_pool import KVPool
from kvferry_engine.models.base import Model, OnLayer
from kvferry_engine.models.layers import Parameters, Rope, rotate
from kvferry_engine.models.linear import Linear

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of the batch's positions, each [T, 1, D]."""


class LlamaAttention:
    """Grouped-query attention over the paged cache; q, k and v come from one fused projection."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str) -> None:
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = [(f"{prefix}.q_proj", q), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
        self.qkv: Linear = parameters.linear(parts, config.hidden_size, bias=config.attention_bias)
        self.output: Linear = parameters.linear(
            [(f"{prefix}.o_proj", config.hidden_size)], q, bias=config.attention_bias
        )

    def __call__(self, layer: int, x: torch.Tensor, turn: Turn, plan: AttentionPlan) -> torch.Tensor:
        """Attend from x [T, E], after writing its keys and values; returns [T, E]."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, H + 2 K, D]
        turned = rotate(qkv[:, : self.heads + self.kv_heads], *turn)  # [T, H + K, D]
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        plan.append_kv(layer, k, qkv[:, self.heads + self.kv_heads :])
        return self.output(plan.run(layer, q).view(len(x), -1))  # [T, H D] -> [T, E]


class LlamaMlp:
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str) -> None:
        size = config.intermediate_size
        parts = [(f"{prefix}.gate_proj", size), (f"{prefix}.up_proj", size)]
        self.gate_up: Linear = parameters.linear(parts, config.hidden_size, bias=config.mlp_bias)
        self.down: Linear = parameters.linear([(f"{prefix}.down_proj", config.hidden_size)], size, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each row of x [T, E]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [T, F] each
        return self.down(functional.silu(gate).mul_(up))  # [T, E]


class LlamaLayer:
    """Attention and MLP, each on the normalised residual stream and added back to it."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str) -> None:
        self.attention_norm = parameters.norm(f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = LlamaAttention(config, parameters, f"{prefix}.self_attn")
        self.mlp_norm = parameters.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMlp(config, parameters, f"{prefix}.mlp")

    def attend(self, layer: int, x: torch.Tensor, turn: Turn, plan: AttentionPlan) -> torch.Tensor:
        """First half of the layer, x [T, E]; when it returns, the layer's keys and values are in the pool."""
        return x + self.attention(layer, self.attention_norm(x), turn, plan)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Second half of the layer, x [T, E]."""
        return x + self.mlp(self.mlp_norm(x))


class Llama(Model):
    """LlamaForCausalLM."""

    def __init__(
        self, config: ModelConfig, attention: AttentionBackend, *, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        super().__init__(config, attention, dtype=dtype, device=device)
        if config.hidden_act != "silu":
            msg = f"{config.architecture} with activation {config.hidden_act!r} is not supported; supported is silu"
            raise ModelError(msg)
        parameters = self.parameters
        self.embedding = parameters.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(config, parameters, f"model.layers.{index}") for index in range(config.layers)]
        self.norm = parameters.norm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = (
            Linear(self.embedding)
            if config.tie_word_embeddings
            else parameters.linear([("lm_head", config.vocab_size)], config.hidden_size)
        )
        self.rope = Rope(config.rope, config.head_dim, config.max_positions, device)

    def _forward(self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, *, logits: bool) -> torch.Tensor | None:
        plan = self.attention.plan(batch, pool)
        turn = self.rope.at(batch.positions, self.dtype)
        x = functional.embedding(batch.tokens, self.embedding)  # [T, E]
        for index, layer in enumerate(self.layers):
            x = layer.attend(index, x, turn, plan)
            on_layer(index)
            if index + 1 < len(self.layers):
                x = layer.feed_forward(x)
        if not logits:
            return None
        # Nothing reads the last layer's other rows: the cache is written, and only these tokens are asked about.
        x = self.layers[-1].feed_forward(x[batch.logit_rows])
        return self.head(self.norm(x)).float()  # [sequences that want logits, V]
