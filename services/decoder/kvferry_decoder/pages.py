"""Pages of requests: what a request shares with the prefix cache, what it holds alone, and what others may find of it.

A request's pages hold its tokens in order. Those at its beginning that the cache had are shared, and never written to;
its own are published when they are full and their KV is complete.
"""

from kvferry_engine.prefix_cache import PrefixCache
from kvferry_proto.hashing import extend_hashes
from kvferry_proto.layout import KVLayout

from kvferry_decoder.request import Request


class RequestPages:
    """Gives pages to requests, and takes them back. Who is to have them is the scheduler's to say."""

    def __init__(self, allocator: PrefixCache, layout: KVLayout) -> None:
        self.allocator = allocator
        self.layout = layout

    # --- all tokens at once ----------------------------------------------------------------------------------

    def find(self, request: Request) -> list[int]:
        """Return the pages of a request's beginning that are here. The last token's is not among them: it is to be
        computed and drawn from."""
        usable = (len(request.tokens) - 1) // self.layout.page_size
        return self.allocator.find(self._hashes(request)[:usable])

    def can_reserve(self, request: Request, found: list[int], beside: int) -> bool:
        """Whether there are pages for all of a request's tokens, and `beside` more."""
        missing = self.layout.pages_for(len(request.tokens)) - len(found)
        return self.allocator.can_allocate(missing + beside, found)

    def reserve(self, request: Request, found: list[int]) -> None:
        """Take pages for all of a request's tokens, those of `find` among them."""
        missing = self.layout.pages_for(len(request.tokens)) - len(found)
        request.pages = self.allocator.claim(found, missing)
        request.held = request.published = len(found)
        request.computed = len(found) * self.layout.page_size

    # --- while it answers ------------------------------------------------------------------------------------

    def grow(self, request: Request, tokens: int) -> bool:
        """Take pages up to `tokens`; False, and none is taken, if there are too few."""
        missing = self.layout.pages_for(tokens) - len(request.pages)
        if missing > 0:
            if not self.allocator.can_allocate(missing):
                return False
            request.pages.extend(self.allocator.allocate(missing))
        return True

    def trim(self, request: Request) -> None:
        """Take back the pages that drafts alone have stood in."""
        kept = self.layout.pages_for(len(request.tokens))
        surplus, request.pages = request.pages[kept:], request.pages[:kept]
        if surplus:
            self.allocator.free(surplus)

    def room(self, request: Request) -> int:
        """Tokens that fit into the pages that it has."""
        return len(request.pages) * self.layout.page_size

    # --- what others find ------------------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Let others find the pages that are full and computed by now."""
        first, full = request.published, request.computed // self.layout.page_size
        if full > first:
            self.allocator.publish(request.pages[first:full], self._hashes(request)[first:full])
            request.published = full

    def doubt(self, request: Request) -> None:
        """What a request computed can't be right: nobody shares its pages any more."""
        self.allocator.retract(request.pages)

    def _hashes(self, request: Request) -> list[int]:
        extend_hashes(request.hashes, request.tokens, self.layout.page_size, self.layout.model, request.cache_salt)
        return request.hashes

    # --- back ------------------------------------------------------------------------------------------------

    def surrender(self, request: Request) -> list[int]:
        """Hand a receiving request's own pages over: held, and no longer the request's. It keeps those it shares."""
        own, request.pages = request.pages[request.held :], request.pages[: request.held]
        return own

    def free(self, request: Request) -> None:
        """Take all of a request's pages back."""
        if request.pages:
            self.allocator.free(request.pages)
            request.pages = []
