"""Which layers of a model have a mixture of experts, and how a token chooses among them."""

from dataclasses import dataclass
from typing import Any

from kvferry_engine.config_fields import first, only


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    """Experts that each token passes."""
    intermediate_size: int
    """Of one expert."""
    normalise: bool = False
    """Whether the weights of a token's experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep the plain MLP."""
    groups: int = 1
    """Runs of equally many experts, of which a token may use the best `top_groups`."""
    top_groups: int = 1
    scale: float = 1.0
    """What the weights of a token's experts are multiplied by."""
    shared_size: int = 0
    """Intermediate size of the experts that every token passes, taken together; 0 where there are none."""

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            msg = f"moe_intermediate_size must be at least 1, got {self.intermediate_size}"
            raise ValueError(msg)
        if not 1 <= self.per_token <= self.count:
            msg = f"num_experts_per_tok is {self.per_token}, of {self.count} experts"
            raise ValueError(msg)
        if self.groups < 1 or self.count % self.groups or (self.groups > 1 and self.count < 2 * self.groups):
            msg = f"{self.count} experts cannot be in {self.groups} groups of equally many, two or more"
            raise ValueError(msg)
        if not 1 <= self.top_groups <= self.groups:
            msg = f"topk_group is {self.top_groups}, of {self.groups} groups"
            raise ValueError(msg)
        if self.per_token > self.top_groups * self.count // self.groups:
            msg = f"{self.per_token} experts per token are more than {self.top_groups} of {self.groups} groups hold"
            raise ValueError(msg)


def read_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Experts of any spelling of their number; None where every layer is dense. Raises ValueError."""
    count = int(first(raw, "num_experts", "num_local_experts", "n_routed_experts", default=0))
    if not count:
        return None
    only(raw, "topk_method", "noaux_tc")
    only(raw, "scoring_func", "sigmoid")
    only(raw, "moe_layer_freq", 1)
    size = int(raw["moe_intermediate_size"])
    return ExpertsConfig(
        count=count,
        per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=size,
        normalise=bool(first(raw, "norm_topk_prob", default=False)),
        dense_layers=_dense_layers(raw),
        groups=int(first(raw, "n_group", default=1)),
        top_groups=int(first(raw, "topk_group", default=1)),
        scale=float(first(raw, "routed_scaling_factor", default=1.0)),
        shared_size=size * int(first(raw, "n_shared_experts", default=0)),
    )


def _dense_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    every = int(first(raw, "decoder_sparse_step", default=1))
    if every < 1:
        msg = f"decoder_sparse_step must be at least 1, got {every}"
        raise ValueError(msg)
    dense = {int(layer) for layer in first(raw, "mlp_only_layers", default=())}
    dense |= set(range(int(first(raw, "first_k_dense_replace", default=0))))
    layers = range(int(raw["num_hidden_layers"]))
    return tuple(layer for layer in layers if layer in dense or (layer + 1) % every)
