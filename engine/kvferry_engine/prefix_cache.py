"""The prefix cache: a book of pages that knows what is in them, so that equal prefixes share pages.

A full page whose KV is complete is published under its block hash, which covers all tokens up to the page's end
(kvferry_proto.hashing). Whoever needs the same prefix takes a reference to the page in place of a page of its own.
Nobody writes to a published page again. When its last reference goes, the page is kept and counts as available: it is
evicted, least recently used first, only when no free page is left.

    free ──allocate──▶ held, one reference ──publish──▶ held, shared by reference count
     ▲                     │ free                          │ last reference freed      ▲
     └─────────────────────┘                               ▼                           │ claim
     └──────────────────────────evict──────────────────  cached ──────────────────────┘
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvferry_engine.allocator import HELD, PageAllocator
from kvferry_engine.errors import OutOfPagesError, PageError


class PrefixCache(PageAllocator):
    """A page allocator whose pages are counted references and outlive their users. One scheduler owns it."""

    def __init__(self, pages: int, *, enabled: bool = True) -> None:
        """`enabled`: False publishes nothing, so nothing is ever found or kept."""
        super().__init__(pages)
        self._enabled = enabled
        self._references = [0] * pages
        self._page_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached pages, least recently used first."""
        self.hits = 0
        """Pages that were claimed and had not to be computed or received."""
        self.published = 0
        self.evicted = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now: free ones, and cached ones, which are evicted for it."""
        return super().free_pages + self.cached_pages

    def can_allocate(self, count: int, claimed: Sequence[int] = ()) -> bool:
        """Tell whether `count` pages can be allocated when `claimed`, from `find`, are in use."""
        return count <= self.free_pages - sum(page in self._idle for page in claimed)

    # --- what is in the pages --------------------------------------------------------------------------------

    def find(self, hashes: Iterable[int]) -> list[int]:
        """Return the pages of the longest prefix of these block hashes that is here. Changes nothing."""
        pages = []
        for block_hash in hashes:
            page = self._page_of.get(block_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, pages: Sequence[int], hashes: Sequence[int]) -> None:
        """Tell what is in held pages that are full and whose KV is complete.

        A page whose content is published already under another page stays its holder's own. Raises PageError unless
        every page is held, with one hash for each.
        """
        self._checked_runs(pages, HELD)
        for page, block_hash in zip(pages, hashes, strict=True):
            if self._enabled and page not in self._hash_of and block_hash not in self._page_of:
                self._page_of[block_hash], self._hash_of[page] = page, block_hash
                self.published += 1

    def retract(self, pages: Iterable[int]) -> None:
        """Let nobody find these pages any more: what is in them is doubtful. Who holds them keeps them."""
        doubtful = [page for page in pages if page in self._hash_of]
        self._forget(doubtful)
        idle = [page for page in doubtful if page in self._idle]
        self._drop(idle)

    # --- references ------------------------------------------------------------------------------------------

    def claim(self, found: Sequence[int], count: int) -> list[int]:
        """Take a reference to each page of `found`, from `find`, and `count` pages more; return all in this order.

        Raises OutOfPagesError, and takes nothing, when there are too few.
        """
        if not self.can_allocate(count, found):
            msg = f"{count} pages asked for beside {len(found)} in use, {self.free_pages} of {self.pages} available"
            raise OutOfPagesError(msg)
        idle = [page for page in found if page in self._idle]
        self.revive(idle)
        for page in idle:
            del self._idle[page]
        for page in found:
            self._references[page] += 1
        self.hits += len(found)
        return [*found, *self.allocate(count)]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages that nobody else has, as the allocator does; cached pages are evicted as needed."""
        missing = count - super().free_pages
        if 0 < missing <= self.cached_pages:
            oldest = list(islice(self._idle, missing))
            self._forget(oldest)
            self._drop(oldest)
            self.evicted += missing
        pages = super().allocate(count)
        for page in pages:
            self._references[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give references back, one for each page; raises PageError, and changes nothing, unless all are held.

        In order of a sequence: its last pages are evicted first, since a prefix is of use without them.
        """
        self._checked_runs(pages, HELD)
        for page in pages:
            self._references[page] -= 1
        unused = [page for page in pages if not self._references[page]]
        kept = [page for page in unused if page in self._hash_of]
        self.keep(kept)
        self._idle.update(dict.fromkeys(reversed(kept)))
        super().free([page for page in unused if page not in self._hash_of])

    def quarantine(self, pages: Sequence[int]) -> None:
        """Take pages out of use that a writer may still reach; raises PageError if anybody else could read one."""
        for page in pages:
            if page in self._hash_of or self._references[page] > 1:
                msg = f"page {page} is shared: nobody can be writing to it"
                raise PageError(msg)
        super().quarantine(pages)
        for page in pages:
            self._references[page] = 0

    # --- the book --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Audit the book and the cache; raises PageError."""
        super().check()
        held = {page for page in range(self.pages) if self._references[page]}
        if len(held) != self.held_pages or any(self._state[page] != HELD for page in held):
            msg = f"{len(held)} pages have references, {self.held_pages} are held"
            raise PageError(msg)
        if len(self._idle) != self.cached_pages or not self._idle.keys() <= self._hash_of.keys():
            msg = f"{len(self._idle)} pages can be evicted, {self.cached_pages} are cached"
            raise PageError(msg)
        if self._page_of != {block_hash: page for page, block_hash in self._hash_of.items()}:
            msg = "the hashes of pages differ from the pages of hashes"
            raise PageError(msg)

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            del self._page_of[self._hash_of.pop(page)]

    def _drop(self, idle: Sequence[int]) -> None:
        """Make cached pages free."""
        for page in idle:
            del self._idle[page]
        self.evict(idle)
