"""How large a model's KV pages are, and how many fit: known before there is a pool, and without torch."""

from kvferry_proto.layout import KVLayout

from kvferry_engine.config import ModelConfig


def kv_layout(config: ModelConfig, *, dtype: str, page_size: int, ranks: int = 1) -> KVLayout:
    """Layout of the KV cache of the model in `config`'s folder; raises ValueError where a number does not fit."""
    return KVLayout(
        model=config.fingerprint(),
        dtype=dtype,
        layers=config.layers + config.draft_layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        ranks=ranks,
        latent=config.latent is not None,
    )


def pages_for_bytes(layout: KVLayout, size: int) -> int:
    """Pages, over all layers, that fit into `size` bytes of one rank."""
    return size // (layout.page_bytes * layout.layers)


def enough_pages(layout: KVLayout, size: int) -> int:
    """Pages that --kv-memory of `size` bytes gives each rank; raises ValueError where no node could work with them."""
    pages = pages_for_bytes(layout, size)
    if pages < 2:
        needed = 2 * layout.page_bytes * layout.layers
        msg = f"--kv-memory {size} holds {pages} pages; at least {needed} bytes (2 pages) are needed"
        raise ValueError(msg)
    return pages
