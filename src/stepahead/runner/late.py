"""Rows that wait for masks: who they are, where their grammars stand, and when the masks are there.

Matchers stand beside the thread that launches.  Of a step's late rows they hear the tokens as soon
as these have landed here, and make all masks of the next step while its forward runs:

    forward    [ model n | first rows | late rows ]  [ model n+1     | first rows | late rows ]
    beside                                         \\ heard n | masks n+1 /
    schedule                                                    masks in /

Knows slots and grammars; what a mask does to logits is the sampler's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from stepahead.device.base import Device, Event, HostArray, Side
from stepahead.plan import Join, Plan, RowFailure
from stepahead.runner.flight import Heard, Masks
from stepahead.runner.grammar import Matchers
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.stage import LateRows


class LateSide:
    """The matchers' side.  Its calls come from the thread that launches, in the order of steps."""

    def __init__(self, device: Device, spec: RunnerSpec) -> None:
        self.bound = np.zeros(spec.num_slots, np.bool_)  # whose rows are late
        self._device = device
        self._vocabulary = spec.vocabulary
        self._num_slots = spec.num_slots
        self._width = spec.width
        self._words = 0 if spec.vocabulary is None else spec.vocabulary.words
        self._generation = np.zeros(spec.num_slots, np.int64)
        self._side: Side | None = None
        self._matchers: Matchers | None = None
        # of slots whose failure no step has told yet
        self._unsaid: dict[tuple[int, int], str] = {}
        self._drafts: dict[int, list[int]] = {}  # that the newest landed step left, by slot

    def close(self) -> None:
        """Ends the thread, if there is one."""
        if self._side is not None:
            self._side.close()

    def change(self, plan: Plan) -> None:
        """Slots get new owners, or none, before the plan is staged."""
        for slot in plan.leaves.tolist():
            if self.bound[slot]:
                self.bound[slot] = False
                self._do(lambda s=slot, g=int(self._generation[slot]): self._leave(s, g))
        for join in plan.joins:
            if join.grammar is not None:
                self.bound[join.slot] = True
                self._generation[join.slot] = join.generation
                self._do(lambda join=join: self._enter(join))

    def masks(self, rows: LateRows) -> Masks:
        """Has the masks of a step's late rows made, behind all that was asked before."""
        words = np.empty((int(rows.widths.sum()), self._words), np.int32)
        legal = None
        if self._width > 1:
            decoding = rows.rows[rows.widths > 1]
            legal = np.stack([decoding, np.full(len(decoding), self._width - 1)])
        self._do(lambda: self._fill(rows, words, legal))
        return Masks(self._made_side().mark(), words, legal)

    def hear(
        self, step: int, rows: LateRows, event: Event, tokens: HostArray, drafts: HostArray | None
    ) -> Heard:
        """Has the matchers hear the late rows' tokens once `event` has passed, and `drafts`
        int64[m, k], what may come next."""
        heard = Heard()
        side = self._made_side()
        side.do(lambda: self._hear(step, rows, tokens, drafts, heard), event)
        heard.point = side.mark()
        return heard

    def _do(self, job: Callable[[], None]) -> None:
        self._made_side().do(job)

    def _made_side(self) -> Side:
        if self._side is None:
            self._side = self._device.side("stepahead-grammar")
        return self._side

    # --- beside the thread that launches ------------------------------------------------------

    def _made_matchers(self) -> Matchers:
        if self._matchers is None:
            vocabulary = self._vocabulary
            assert vocabulary is not None, "a grammar came, and the runner has no vocabulary"
            self._matchers = Matchers(vocabulary, self._num_slots)
        return self._matchers

    def _enter(self, join: Join) -> None:
        assert join.grammar is not None
        known = join.tokens[join.prompt_len :].tolist()
        self._made_matchers().start(join.slot, join.generation, join.grammar, known)
        self._drafts.pop(join.slot, None)

    def _leave(self, slot: int, generation: int) -> None:
        self._made_matchers().leave(slot, generation)
        # no later step names it, so that nobody would ask
        self._note_failures()
        self._unsaid.pop((slot, generation), None)

    def _fill(self, rows: LateRows, words: np.ndarray, legal: np.ndarray | None) -> None:
        matchers, slots = self._made_matchers(), rows.slots.tolist()
        if legal is None:
            matchers.fill(slots, words)
            return
        drafts = [
            self._drafts.get(slot, []) if width > 1 else []
            for slot, width in zip(slots, rows.widths.tolist(), strict=True)
        ]
        counts = np.array([len(run) for run in drafts])
        packed = np.empty((int((1 + counts).sum()), self._words), np.int32)
        allowed = np.array(matchers.fill_drafts(slots, drafts, packed))
        words[:] = -1
        first = np.cumsum(rows.widths) - rows.widths
        of = np.repeat(first, 1 + counts)
        within = np.arange(len(of)) - np.repeat(np.cumsum(1 + counts) - (1 + counts), 1 + counts)
        words[of + within] = packed
        legal[1] = allowed[rows.widths > 1]

    def _hear(
        self,
        step: int,
        rows: LateRows,
        tokens: HostArray,
        drafts: HostArray | None,
        heard: Heard,
    ) -> None:
        matchers, found = self._made_matchers(), tokens.read()
        counts = np.ones(len(rows.slots), np.int64)
        if self._width > 1:
            first = np.cumsum(rows.widths) - rows.widths
            counts = np.add.reduceat((found >= 0).astype(np.int64), first)
            found = found[found >= 0]
        taken = matchers.advance(step, rows.slots, rows.generations, found, counts)
        for place in matchers.ended[rows.slots].nonzero()[0].tolist():
            heard.ended += int(rows.rows[place]), max(1, int(taken[place]))
        self._tell_failures(rows, heard)
        if drafts is not None:
            for slot, run in zip(rows.slots.tolist(), drafts.read().tolist(), strict=True):
                self._drafts[slot] = run[: run.index(-1)] if -1 in run else run

    def _note_failures(self) -> None:
        for error in self._made_matchers().take_errors():
            self._unsaid[error.slot, error.generation] = error.reason

    def _tell_failures(self, rows: LateRows, heard: Heard) -> None:
        self._note_failures()
        if not self._unsaid:
            return
        owners = zip(rows.slots.tolist(), rows.generations.tolist(), strict=True)
        for place, owner in enumerate(owners):
            if owner in self._unsaid:
                failure = RowFailure(int(rows.rows[place]), self._unsaid.pop(owner))
                heard.failed.append(failure)


class Pending:
    """The one step whose late rows the device has not got yet; whoever comes first gives them."""

    def __init__(self) -> None:
        self._give: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def put(self, give: Callable[[], None]) -> None:
        """`give` queues the late rows of the step just launched."""
        self._give = give

    def finish(self) -> None:
        """Returns when they are queued; raises what kept them from it."""
        with self._lock:
            give, self._give = self._give, None
            if give is not None:
                give()
