"""What must hold of a scheduler at any time, and what at rest.  For debug mode and tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stepahead.plan import NO_INTS
from stepahead.scheduler.heard import Launched
from stepahead.scheduler.lifetime import Entry, Lifetime, Standing


def check(
    life: Lifetime, flights: Iterable[Launched], entries: Iterable[Entry] | None = None
) -> None:
    """AssertionError unless frontiers, pins, pages, slots and the queue's pages add up."""
    table = life.table
    planned, in_flight, promised, pins, budget = table.folded()
    names = np.zeros(table.num_slots, np.int32)
    positions = np.zeros(table.num_slots, np.int32)
    for flight in flights:
        np.add.at(names, flight.rows.slots, 1)
        np.add.at(positions, flight.rows.slots, table.width)
        np.add.at(names, flight.chunks[:, 0], 1)
        np.add.at(positions, flight.chunks[:, 0], flight.chunks[:, 2])
        assert (table.generation[flight.slots] == flight.generations).all(), (
            "a slot has a new owner while a flight names the old one"
        )
    assert (pins == names).all(), "pins are not the flights that name a slot"
    assert (in_flight == positions).all(), "in_flight is not the sum over flights"
    assert (promised >= 0).all(), "a row was promised fewer than no tokens"
    reached = np.minimum(planned, table.limit)
    assert (reached <= table.covered).all(), "a planned position has no page"
    if table.width == 1:
        assert (budget >= 0).all(), "a row was launched past its length"
    else:
        _check_settled(life, flights)
    used = [slot for slot, entry in enumerate(life.entries) if entry is not None]
    assert table.free_slots + len(used) == table.num_slots - 1, "a slot is lost"
    owned = [table.pages_of(slot)[table.held[slot] :] for slot in used]
    life.store.check(np.concatenate([NO_INTS, *owned]))
    if entries is None:
        return  # of who asks and knows the slots alone
    unplaced = [e for e in entries if e.standing in (Standing.WAITING, Standing.PREEMPTED)]
    pages = sum(-(-len(entry.tokens) // life.store.page_size) for entry in unplaced)
    assert life.queued_pages == pages, "the queue's pages are not those of its entries"


def _check_settled(life: Lifetime, flights: Iterable[Launched]) -> None:
    """What is settled is what is known but for the newest token, or drafts were taken back
    wrongly."""
    table = life.table
    filling = {slot for flight in flights for slot in flight.chunks[:, 0].tolist()}
    for entry in life.entries:
        if entry and entry.standing is Standing.DECODE and entry.slot not in filling:
            known = int(table.length[entry.slot])
            assert table.settled(entry.slot) == known - 1, "drafts were taken back wrongly"


def check_at_rest(life: Lifetime) -> None:
    """AssertionError unless an idle scheduler has everything back."""
    table = life.table
    assert not table.folded()[3].any() and not life.ghosts, "a pin is left"
    assert table.free_slots == table.num_slots - 1, "a slot is left"
    assert life.store.available == life.store.num_pages - 1, "a page is left"
    assert not life.stops.counted, "a stop rule is left"
    check(life, (), ())
