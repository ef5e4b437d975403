import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvferry_engine.allocator import PageAllocator, runs_of
from kvferry_engine.errors import OutOfPagesError, PageError

PAGES = 40


def test_a_fresh_pool_gives_one_run():
    book = PageAllocator(8)
    assert book.allocate(5) == [0, 1, 2, 3, 4]
    assert (book.free_pages, book.held_pages, book.quarantined_pages) == (3, 5, 0)


def test_the_smallest_run_that_fits_is_taken():
    book = PageAllocator(20)
    book.allocate(20)
    book.free([2, 3, 4, 5, 6, 7])
    book.free([10, 11, 12])
    book.free([15, 16, 17, 18])
    assert book.allocate(3) == [10, 11, 12]
    assert book.allocate(4) == [15, 16, 17, 18]


def test_without_a_run_that_fits_the_fewest_runs_are_taken():
    book = PageAllocator(20)
    book.allocate(20)
    for run in ([0], [2, 3], [5, 6, 7, 8, 9], [12, 13, 14]):
        book.free(run)
    assert runs_of(book.allocate(7)) == [(2, 4), (5, 10)]


def test_allocating_nothing_takes_nothing():
    book = PageAllocator(3)
    assert book.allocate(0) == []
    assert book.free_pages == 3


def test_too_much_is_refused_whole():
    book = PageAllocator(4)
    book.allocate(1)
    assert not book.can_allocate(4)
    with pytest.raises(OutOfPagesError, match="4 pages asked for, 3 of 4 free"):
        book.allocate(4)
    assert book.free_pages == 3
    book.check()


@pytest.mark.parametrize(
    ("pages", "what"),
    [([0, 9], "page 9 is not one of"), ([-1], "page -1 is not one of"), ([1, 1], "named twice"), ([0, 5], "page 5 is")],
)
def test_a_wrong_free_changes_nothing(pages, what):
    book = PageAllocator(8)
    book.allocate(3)
    with pytest.raises(PageError, match=what):
        book.free(pages)
    assert book.held_pages == 3
    book.check()


def test_a_page_is_freed_once():
    book = PageAllocator(8)
    pages = book.allocate(3)
    book.free(pages)
    with pytest.raises(PageError, match="page 0 is free, not held"):
        book.free(pages)


def test_pages_in_quarantine_are_nobodys():
    book = PageAllocator(4)
    pages = book.allocate(3)
    book.quarantine(pages)
    assert (book.free_pages, book.held_pages, book.quarantined_pages) == (1, 0, 3)
    assert not book.can_allocate(2)
    with pytest.raises(PageError, match="page 0 is quarantined, not held"):
        book.free(pages)
    book.release_quarantine(pages)
    assert book.allocate(4) == [0, 1, 2, 3]


def test_release_of_what_is_not_in_quarantine_is_refused():
    book = PageAllocator(4)
    held = book.allocate(2)
    with pytest.raises(PageError, match="page 0 is held, not quarantined"):
        book.release_quarantine(held)


def test_check_finds_a_falsified_book():
    book = PageAllocator(4)
    book._state[2] = 1
    with pytest.raises(PageError, match="differ"):
        book.check()


class Bookkeeping(RuleBasedStateMachine):
    """Compares the allocator with three plain sets of pages."""

    def __init__(self):
        super().__init__()
        self.book = PageAllocator(PAGES)
        self.held: list[list[int]] = []
        self.quarantined: list[list[int]] = []

    def free_set(self) -> set[int]:
        used = {page for group in (*self.held, *self.quarantined) for page in group}
        return set(range(PAGES)) - used

    @rule(count=st.integers(1, 12))
    def allocate(self, count):
        free = self.free_set()
        runs = runs_of(free)
        if len(free) < count:
            with pytest.raises(OutOfPagesError):
                self.book.allocate(count)
            return
        pages = self.book.allocate(count)
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= free
        lengths = sorted((end - start for start, end in runs), reverse=True)
        fewest = next(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= count)
        assert len(runs_of(pages)) <= fewest
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        kept = data.draw(st.integers(0, len(pages)))
        self.book.free(pages[kept:])
        if kept:
            self.held.append(pages[:kept])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.book.quarantine(pages)
        self.quarantined.append(pages)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release(self, data):
        pages = self.quarantined.pop(data.draw(st.integers(0, len(self.quarantined) - 1)))
        self.book.release_quarantine(pages)

    @rule(page=st.integers(-2, PAGES + 2))
    def free_what_is_not_held(self, page):
        if not any(page in group for group in self.held):
            with pytest.raises(PageError):
                self.book.free([page])

    @invariant()
    def the_book_balances(self):
        self.book.check()
        assert self.book.free_pages == len(self.free_set())
        assert self.book.held_pages == sum(map(len, self.held))
        assert self.book.quarantined_pages == sum(map(len, self.quarantined))
        assert self.book.free_runs == runs_of(self.free_set())


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
