"""What the services may ask of any model, whatever its architecture."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from kvferry_proto.layout import KVLayout

from kvferry_engine.attention import AttentionBackend
from kvferry_engine.batch import ForwardBatch
from kvferry_engine.config import ModelConfig
from kvferry_engine.dtypes import dtype_name
from kvferry_engine.errors import BatchError
from kvferry_engine.kv_pool import KVPool, kv_layout
from kvferry_engine.models.parameters import Parameters
from kvferry_engine.shard import ALONE, Shard

OnLayer = Callable[[int], None]


class Model(ABC):
    """One rank's share of a language model over a paged KV cache; its weights are filled by `load_model`."""

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        shard: Shard = ALONE,
    ) -> None:
        self.config = config
        self.attention = attention
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.parameters = Parameters(dtype, device, shard)

    def kv_layout(self, page_size: int) -> KVLayout:
        """Layout of a KV cache for this model, in the dtype of its weights, over all ranks."""
        return kv_layout(self.config, dtype=dtype_name(self.dtype), page_size=page_size, ranks=self.shard.ranks)

    def forward(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer | None = None, *, logits: bool = True
    ) -> torch.Tensor | None:
        """Run the batch: its keys and values go to the pool. All ranks of a node run the same batch together.

        Returns the logits, float32 [sequences that want them, vocabulary], after the last token of each such
        sequence, or None when no sequence wants any or `logits` is false, and on all ranks but the first. `on_layer(l)`
        is called when layer l's output projection is done, so its keys and values are in the pools of all ranks.
        Raises BatchError when the batch does not fit the model or the pool. Not to be run by two threads at once.
        """
        self.check(batch, pool)
        with torch.inference_mode():
            return self._forward(batch, pool, on_layer or _ignore, logits=logits and batch.wants_logits)

    @abstractmethod
    def _forward(
        self, batch: ForwardBatch, pool: KVPool, on_layer: OnLayer, *, logits: bool
    ) -> torch.Tensor | None: ...

    def check(self, batch: ForwardBatch, pool: KVPool) -> None:
        """Raise BatchError when the batch does not fit the model or the pool."""
        layout, config = pool.layout, self.config
        heads = self.shard.kv_heads(config).size
        mine = (config.layers, heads, config.head_dim, dtype_name(self.dtype), batch.page_size)
        theirs = (layout.layers, layout.heads_per_rank, layout.head_dim, layout.dtype, layout.page_size)
        if mine != theirs:
            msg = f"the pool's (layers, KV heads, head dim, dtype, page size) are {theirs}, the model's step has {mine}"
            raise BatchError(msg)
        batch.check_fits(vocab_size=config.vocab_size, max_positions=config.max_positions, pages=pool.pages)


def _ignore(_layer: int) -> None:
    return
