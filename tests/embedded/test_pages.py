"""Laws of the page and slot allocators, for every order of growing and releasing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto_deploy_ext.embedded.pages import OutOfPagesError, PageAllocator, SlotAllocator

PROGRAMS = st.lists(st.tuples(st.sampled_from("gr"), st.integers(0, 4), st.integers(0, 6)), max_size=40)


@given(num_pages=st.integers(1, 12), program=PROGRAMS)
def test_every_page_has_one_owner_or_is_free_and_pages_keep_their_order(num_pages, program):
    allocator = PageAllocator(num_pages, tokens_per_page=4)
    owned: dict[int, tuple[int, ...]] = {}
    for action, owner, amount in program:
        before = owned.get(owner, ())
        if action == "r":
            allocator.release(owner)
            owned[owner] = ()
        elif amount - len(before) > allocator.num_free:
            with pytest.raises(OutOfPagesError, match=f"{num_pages}"):
                allocator.grow(owner, amount)
        else:
            owned[owner] = tuple(allocator.grow(owner, amount))
            assert owned[owner][: len(before)] == before
            assert len(owned[owner]) == max(amount, len(before))
        assert {key: tuple(allocator.pages(key)) for key in owned} == owned
        in_use = [page for pages in owned.values() for page in pages]
        assert len(set(in_use)) == len(in_use)
        assert set(in_use) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(in_use)


@given(num_tokens=st.integers(0, 100), tokens_per_page=st.integers(1, 9))
def test_pages_for_is_the_least_that_holds_the_tokens(num_tokens, tokens_per_page):
    pages = PageAllocator(1, tokens_per_page).pages_for(num_tokens)
    assert (pages - 1) * tokens_per_page < num_tokens <= pages * tokens_per_page or pages == num_tokens == 0


@given(order=st.permutations(range(4)))
def test_slots_are_distinct_and_come_back(order):
    allocator = SlotAllocator(4)
    taken = [allocator.take() for _ in range(4)]
    assert sorted(taken) == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        allocator.take()
    for slot in order:
        allocator.give_back(slot)
    assert allocator.num_free == 4
    with pytest.raises(ValueError, match="slot 2 is free already"):
        allocator.give_back(2)


def test_a_pool_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 x 4"):
        PageAllocator(0, 4)
