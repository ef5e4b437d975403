"""Whether a model can be split over ranks: known from its configuration alone, without torch."""

from kvferry_proto.layout import KVLayout

from kvferry_engine.config import ModelConfig
from kvferry_engine.errors import ModelError


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raise ModelError, naming both numbers, if the model cannot be split over `ranks` ranks. Reads no weights."""
    try:
        heads_alone(config, ranks)
    except ValueError as error:
        raise ModelError(str(error)) from error
    experts = config.experts
    sizes = {"attention heads": config.heads}
    if experts is None or experts.dense_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if experts is not None:
        sizes["moe_intermediate_size"] = experts.intermediate_size
    for what, size in sizes.items():
        if size % ranks:
            msg = f"{what} {size} cannot be split over {ranks} ranks: it must be a multiple of them"
            raise ModelError(msg)


def heads_alone(config: ModelConfig, ranks: int) -> KVLayout:
    """Layout whose heads alone matter."""
    return KVLayout(
        model="",
        dtype="float32",
        layers=1,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_size=1,
        ranks=ranks,
    )
