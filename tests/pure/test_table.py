"""Columns by slot: row sets select just their rows; slots come lowest first and go back clean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepahead.cache.tokens import TokenMirror
from stepahead.scheduler.table import Table, row_set

SLOTS = st.sets(st.integers(1, 15), max_size=10).map(sorted)


@given(SLOTS)
def test_a_row_set_selects_and_adds_to_exactly_its_rows(slots: list[int]) -> None:
    rids = np.array([slot * 100 for slot in slots], np.int64)
    rows = row_set(np.array(slots, np.int64), rids)
    column, wanted = np.zeros(16, np.int32), np.zeros(16, np.int32)
    wanted[slots] = 1
    column[rows.span] += rows.ones
    assert column.tolist() == wanted.tolist()
    assert np.arange(16)[rows.at].tolist() == slots
    assert rows.wire.tolist() == slots
    assert rows.wire.dtype == np.int32
    assert (rows.count, rows.rids.tolist()) == (len(slots), rids.tolist())


def test_neighbours_are_a_slice() -> None:
    # the fast way: no gather, no mask
    rows = row_set(np.arange(3, 9), np.zeros(6, np.int64))
    assert rows.at == rows.span == slice(3, 9)
    assert rows.ones == 1


def test_slots_come_lowest_first_and_never_the_padding() -> None:
    table = Table(5, 4, TokenMirror(1, 1))
    assert [table.take_slot() for _ in range(4)] == [1, 2, 3, 4]
    assert table.free_slots == 0
    for slot in (3, 1, 4):
        table.give_slot(slot)
    assert [table.take_slot() for _ in range(3)] == [1, 3, 4]


def test_a_slot_comes_back_clean_and_one_generation_on() -> None:
    table = Table(3, 4, TokenMirror(1, 1))
    slot = table.take_slot()
    table.frontier[:, slot] = 7
    table.pins[slot] = 0
    table.deaf[slot] = table.decoding[slot] = True
    table.num_pages[slot] = table.held[slot] = table.covered[slot] = 3
    table.pages[slot, :3] = 9
    table.give_slot(slot)
    assert table.generation.tolist() == [0, 1, 0]
    assert not table.frontier[:, slot].any()
    assert not table.deaf[slot]
    assert not table.decoding[slot]
    assert len(table.pages_of(slot)) == table.held[slot] == table.covered[slot] == 0


def test_a_slot_that_a_flight_names_cannot_be_given_back() -> None:
    table = Table(3, 4, TokenMirror(1, 1))
    slot = table.take_slot()
    table.pins[slot] = 1
    with pytest.raises(AssertionError, match="while a flight names it"):
        table.give_slot(slot)


def test_frontiers_are_views_of_one_block() -> None:
    # a plan moves all of them in one operation
    table = Table(4, 4, TokenMirror(1, 1))
    table.frontier[:, 2] += np.array([5, 4, 3, 2, 1], np.int32)
    columns = (table.planned, table.in_flight, table.promised, table.pins, table.budget)
    assert [int(column[2]) for column in columns] == [5, 4, 3, 2, 1]
    assert table.settled(2) == 1
