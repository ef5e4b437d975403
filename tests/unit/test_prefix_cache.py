"""The prefix cache: equal prefixes share pages, and nobody loses a page that is in use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvferry_engine.allocator import runs_of
from kvferry_engine.errors import OutOfPagesError, PageError
from kvferry_engine.prefix_cache import PrefixCache
from kvferry_proto.hashing import block_hashes
from kvferry_proto.ints import Int32s

PAGES = 12
PAGE_SIZE = 2


def filled(cache, hashes):
    """Pages that were computed for these hashes, published and given back."""
    pages = cache.allocate(len(hashes))
    cache.publish(pages, hashes)
    cache.free(pages)
    return pages


def test_what_was_published_is_found_after_its_user_has_gone():
    cache = PrefixCache(PAGES)
    pages = filled(cache, [11, 12, 13])
    assert cache.find([11, 12, 13]) == pages
    assert (cache.held_pages, cache.cached_pages, cache.free_pages) == (0, 3, PAGES)


def test_a_prefix_ends_at_the_first_page_that_is_not_here():
    cache = PrefixCache(PAGES)
    pages = filled(cache, [11, 12, 13])
    assert cache.find([11, 99, 13]) == pages[:1]
    assert cache.find([99, 12, 13]) == []


def test_a_shared_page_is_held_until_its_last_user_frees_it():
    cache = PrefixCache(PAGES)
    pages = filled(cache, [11, 12])
    first = cache.claim(cache.find([11, 12]), 1)
    second = cache.claim(cache.find([11]), 0)
    assert (first[:2], second) == (pages, pages[:1])
    cache.free(first)
    assert (cache.held_pages, cache.cached_pages) == (1, 1)
    cache.free(second)
    assert (cache.held_pages, cache.cached_pages) == (0, 2)
    assert cache.hits == 3
    cache.check()


def test_free_pages_go_first_then_the_least_recently_used():
    cache = PrefixCache(6)
    filled(cache, [11, 12])
    filled(cache, [21, 22])
    cache.free(cache.claim(cache.find([11, 12]), 0))
    cache.allocate(2)
    assert cache.evicted == 0
    cache.allocate(1)
    assert cache.find([21, 22]) == cache.find([21])
    assert len(cache.find([21])) == 1, "the end of a prefix goes before its beginning"
    cache.allocate(1)
    assert cache.find([21]) == []
    assert len(cache.find([11, 12])) == 2


def test_pages_in_use_are_never_evicted():
    cache = PrefixCache(4)
    filled(cache, [11, 12])
    used = cache.claim(cache.find([11, 12]), 0)
    assert cache.can_allocate(2)
    assert not cache.can_allocate(3)
    with pytest.raises(OutOfPagesError):
        cache.allocate(3)
    assert set(cache.allocate(2)).isdisjoint(used)
    assert cache.find([11, 12]) == used


def test_what_is_claimed_does_not_count_as_available():
    cache = PrefixCache(4)
    filled(cache, [11, 12])
    found = cache.find([11, 12])
    assert cache.can_allocate(2, found)
    assert not cache.can_allocate(3, found)
    with pytest.raises(OutOfPagesError, match="3 pages asked for beside 2 in use"):
        cache.claim(found, 3)
    assert (cache.held_pages, cache.hits) == (0, 0)


def test_the_same_content_twice_is_published_once():
    cache = PrefixCache(4)
    first, second = cache.allocate(1), cache.allocate(1)
    cache.publish(first, [11])
    cache.publish(second, [11])
    assert cache.find([11]) == first
    cache.free(second)
    assert (cache.cached_pages, cache.held_pages) == (0, 1)
    cache.check()


def test_a_page_that_somebody_could_read_is_never_in_quarantine():
    cache = PrefixCache(4)
    published, own = cache.allocate(1), cache.allocate(1)
    cache.publish(published, [11])
    with pytest.raises(PageError, match="shared"):
        cache.quarantine(published)
    cache.quarantine(own)
    with pytest.raises(PageError, match="quarantined, not held"):
        cache.publish(own, [12])
    cache.release_quarantine(own)
    cache.check()


def test_doubtful_pages_are_found_by_nobody():
    cache = PrefixCache(6)
    idle, used = filled(cache, [11, 12]), cache.allocate(1)
    cache.publish(used, [13])
    cache.retract([*idle, *used, 5])
    assert cache.find([11]) == cache.find([13]) == []
    assert (cache.held_pages, cache.cached_pages) == (1, 0)
    cache.free(used)
    assert cache.free_pages == 6
    cache.check()


def test_switched_off_nothing_is_kept():
    cache = PrefixCache(4, enabled=False)
    filled(cache, [11, 12])
    assert cache.find([11]) == []
    assert (cache.cached_pages, cache.published) == (0, 0)


def test_a_wrong_free_changes_nothing():
    cache = PrefixCache(4)
    pages = filled(cache, [11])
    with pytest.raises(PageError, match="cached, not held"):
        cache.free(pages)
    with pytest.raises(PageError, match="named twice"):
        cache.free([*cache.claim(pages, 0), *pages])
    assert (cache.held_pages, cache.cached_pages) == (1, 0)
    cache.check()


def test_a_fresh_cache_gives_long_runs_as_the_allocator_does():
    cache = PrefixCache(40)
    filled(cache, list(range(100, 140)))
    assert len(runs_of(cache.allocate(20))) == 1


class Sharing(RuleBasedStateMachine):
    """Users with random prompts over a tiny vocabulary, held to a plain model: content by page, pages by user."""

    def __init__(self):
        super().__init__()
        self.cache = PrefixCache(PAGES)
        self.users: list[tuple[list[int], list[int], int]] = []
        """Prompt, pages, pages whose KV is complete."""
        self.content: dict[int, tuple[int, ...]] = {}
        """Page: all tokens up to its end, as they were computed into it last."""
        self.quarantined: list[int] = []

    def hashes(self, prompt):
        return block_hashes(Int32s(prompt), PAGE_SIZE, "m")

    @rule(prompt=st.lists(st.integers(0, 1), min_size=2, max_size=10))
    def come(self, prompt):
        hashes = self.hashes(prompt)
        found = self.cache.find(hashes)
        for index, page in enumerate(found):
            assert self.content[page] == tuple(prompt[: PAGE_SIZE * (index + 1)]), "a hit on other content"
        count = -(-len(prompt) // PAGE_SIZE) - len(found)
        in_use = {page for _, pages, _ in self.users for page in pages}
        if len(in_use | set(found)) + count + len(self.quarantined) > PAGES:
            assert not self.cache.can_allocate(count, found)
            return
        pages = self.cache.claim(found, count)
        assert in_use.isdisjoint(pages[len(found) :]), "a page in use was given away"
        self.users.append((prompt, pages, len(found)))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def compute(self, data):
        index = data.draw(st.integers(0, len(self.users) - 1))
        prompt, pages, done = self.users[index]
        full = len(prompt) // PAGE_SIZE
        if done == full:
            return
        upto = data.draw(st.integers(done + 1, full))
        for page in range(done, upto):
            self.content[pages[page]] = tuple(prompt[: PAGE_SIZE * (page + 1)])
        self.cache.publish(pages[done:upto], self.hashes(prompt)[done:upto])
        self.users[index] = prompt, pages, upto

    @precondition(lambda self: self.users)
    @rule(data=st.data(), cut_off=st.booleans())
    def go(self, data, cut_off):
        _, pages, done = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        if cut_off:
            self.cache.quarantine(pages[done:])
            self.quarantined += pages[done:]
            pages = pages[:done]
        self.cache.free(pages)

    @precondition(lambda self: self.quarantined)
    @rule()
    def confirm(self):
        self.cache.release_quarantine(self.quarantined)
        self.quarantined = []

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def doubt(self, data):
        _, pages, _ = data.draw(st.sampled_from(self.users))
        self.cache.retract(pages)
        assert not set(self.cache._hash_of) & set(pages)

    @invariant()
    def the_book_balances(self):
        self.cache.check()
        in_use = {page for _, pages, _ in self.users for page in pages}
        assert self.cache.held_pages == len(in_use)
        assert self.cache.quarantined_pages == len(self.quarantined)
        assert self.cache.free_pages == PAGES - len(in_use) - len(self.quarantined)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
