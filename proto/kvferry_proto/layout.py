"""How a node lays out its KV cache: what both sides of a transfer must know to compute who sends which bytes."""

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of a node's KV cache: one pool per rank, shaped [layer][page][kv head of this rank][K/V][token][dim].

    Heads come before tokens, and K and V of a head lie side by side, so any range of heads of a page is one
    contiguous run of bytes: one write, whatever the sharding on the two sides (spec 18).

    Latent attention (MLA) keeps one vector a token, from which the keys and values of all heads are made: to the
    layout it is one KV head whose K and V are the same numbers, stored once. Every rank holds a copy (spec 17).
    """

    model: str
    """Fingerprint of the weights' configuration; two nodes with different ones never exchange pages."""
    dtype: str
    layers: int
    kv_heads: int
    """Heads of the whole model, over all ranks."""
    head_dim: int
    """Elements of a key, and of a value; of a latent, the turned part of the key included."""
    page_size: int
    """Tokens in a page."""
    ranks: int = 1
    """Tensor-parallel ranks, each with a pool of its own."""
    latent: bool = False
    """Whether a token has one latent for all heads, in place of a K and a V for each KV head."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            msg = f"KV dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}"
            raise ValueError(msg)
        for name in ("layers", "kv_heads", "head_dim", "page_size", "ranks"):
            if getattr(self, name) < 1:
                msg = f"KV layout: {name} must be at least 1, got {getattr(self, name)}"
                raise ValueError(msg)
        if self.latent and self.kv_heads != 1:
            msg = f"a KV layout of latents has 1 KV head, got {self.kv_heads}"
            raise ValueError(msg)
        if self.kv_heads % self.ranks and self.ranks % self.kv_heads:
            msg = (
                f"{self.kv_heads} KV heads cannot be split over {self.ranks} ranks: "
                f"one of the two numbers must divide the other"
            )
            raise ValueError(msg)

    @property
    def heads_per_rank(self) -> int:
        """KV heads that one rank holds; ranks beyond the head count hold copies."""
        return max(1, self.kv_heads // self.ranks)

    @property
    def replicas(self) -> int:
        """How many ranks hold a copy of the same head."""
        return max(1, self.ranks // self.kv_heads)

    @property
    def vectors(self) -> int:
        """Vectors that one head keeps for a token in one layer: K and V, or the latent alone."""
        return 1 if self.latent else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one page in one layer, K and V together."""
        return self.vectors * self.page_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer on one rank."""
        return self.heads_per_rank * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes on one rank, over all layers."""
        return self.layers * self.page_bytes // self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def first_head(self, rank: int) -> int:
        """Index, over the whole model, of the first KV head that `rank` holds."""
        return rank * self.kv_heads // self.ranks

    def mismatch(self, other: "KVLayout", *, names: tuple[str, str] = ("one side", "the other")) -> str | None:
        """Return why pages cannot travel between the two layouts, or None if they can.

        `names` are those of the nodes that have this layout and the other one.
        """
        for name in ("model", "dtype", "layers", "kv_heads", "head_dim", "page_size", "latent"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} differs: {mine!r} on {names[0]}, {theirs!r} on {names[1]}"
        return None
