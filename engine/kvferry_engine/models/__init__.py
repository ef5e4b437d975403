"""Models by the architecture name that their config.json gives."""

from kvferry_engine.models.base import Model, OnLayer
from kvferry_engine.models.deepseek_v3 import DeepseekV3
from kvferry_engine.models.llama import Llama
from kvferry_engine.models.qwen3 import Qwen3
from kvferry_engine.models.qwen3_moe import Qwen3Moe

CLASSES: dict[str, type[Model]] = {
    "DeepseekV3ForCausalLM": DeepseekV3,
    "LlamaForCausalLM": Llama,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}


def model_class(architecture: str) -> type[Model]:
    """Return the class for the architecture of a ModelConfig."""
    return CLASSES[architecture]


__all__ = ["CLASSES", "Model", "OnLayer", "model_class"]
