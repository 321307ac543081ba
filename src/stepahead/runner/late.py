"""Rows that wait for masks: who they are, where their grammars stand, and when the masks are there.

Rows whose logits processor wants their tokens on the host wait for these in the same way.

Matchers stand beside the thread that launches.  Of a step's late rows they hear the tokens as soon
as these have landed here, and make all masks of the next step while its forward runs (on a device
that has run what it was given when it is asked, the launching thread hears):

    forward    [ model n | first rows | late rows ]  [ model n+1     | first rows | late rows ]
    beside                                         \\ heard n | masks n+1 /
    schedule                                                    masks in /

Knows slots and grammars; what a mask does to logits is the sampler's.

Not yet run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from stepahead.device.base import Device, Event, HostArray, Side
from stepahead.plan import Join, Plan, RowFailure
from stepahead.runner.flight import Heard, Masks
from stepahead.runner.grammar import Matchers
from stepahead.runner.host_tokens import HostTokens
from stepahead.runner.spec import RunnerSpec
from stepahead.runner.stage import LateRows


class LateSide:
    """The matchers' side.  Its calls come from the thread that launches, in the order of steps; or
    from the forward's while that one waits for the same call (`flight.Once`)."""

    def __init__(
        self, device: Device, spec: RunnerSpec, vocab_size: int, processed: bool = False
    ) -> None:
        """`processed`: rows that ask for the logits processor wait, for it wants their tokens."""
        self.bound = np.zeros(spec.num_slots, np.bool_)  # whose rows are late
        self._device = device
        self._vocabulary = spec.vocabulary
        self._num_slots = spec.num_slots
        self._width = spec.width
        self._words = -(-vocab_size // 32)
        self._processed = processed
        self._waits = np.zeros(spec.num_slots, np.bool_)  # for the processor, without a grammar
        self._host_tokens = HostTokens()
        self._generation = np.zeros(spec.num_slots, np.int64)
        self._side: Side | None = None
        self._unheard: Heard | None = None  # of the newest step
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
            asks = self._processed and bool(join.params.extra_args)
            self._waits[join.slot] = asks and join.grammar is None
            if join.grammar is not None or asks:
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
        known: list[np.ndarray] = []
        self._do(lambda: self._fill(rows, words, legal, known))
        waits = int(np.count_nonzero(self._waits[rows.slots]))
        return Masks(self._made_side().mark(), words, legal, known, waits)

    def hear(
        self, step: int, rows: LateRows, event: Event, tokens: HostArray, drafts: HostArray | None
    ) -> Heard:
        """Has the matchers hear the late rows' tokens once `event` has passed, and `drafts`
        int64[m, k], what may come next."""
        heard = Heard()
        if event.done():
            # A thread would only fight with this one for the interpreter, while the next step is
            # launched: it hears when that is done, unless somebody wants to know before.
            heard.offer(lambda: self._hear(step, rows, tokens, drafts, heard))
            self._unheard = heard
            return heard
        side = self._made_side()
        side.do(lambda: self._hear(step, rows, tokens, drafts, heard), event)
        heard.point = side.mark()
        return heard

    def _do(self, job: Callable[[], None]) -> None:
        side = self._made_side()
        heard, self._unheard = self._unheard, None
        if heard is not None:  # though somebody may be at it just now
            side.do(heard.hear)  # before anybody comes, goes or wants a mask
            heard.point = side.mark()
        side.do(job)

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
        if join.grammar is not None:
            known = join.tokens[join.prompt_len :].tolist()
            self._made_matchers().start(join.slot, join.generation, join.grammar, known)
        if self._processed and join.params.extra_args:
            self._host_tokens.enter(join.slot, join.tokens)
        self._drafts.pop(join.slot, None)

    def _leave(self, slot: int, generation: int) -> None:
        self._host_tokens.leave(slot)
        if self._matchers is not None:
            self._matchers.leave(slot, generation)
            # no later step names it, so that nobody would ask
            self._note_failures(self._matchers)
        self._unsaid.pop((slot, generation), None)

    def _fill(
        self,
        rows: LateRows,
        words: np.ndarray,
        legal: np.ndarray | None,
        known: list[np.ndarray],
    ) -> None:
        slots, widths = rows.slots.tolist(), rows.widths.tolist()
        drafts = [
            self._drafts.get(slot, []) if width > 1 else []
            for slot, width in zip(slots, widths, strict=True)
        ]
        if self._processed:
            known += self._host_tokens.along(slots, widths, drafts)
        if self._matchers is None:
            words[:] = -1
        elif legal is None:
            self._matchers.fill(slots, words)
        else:
            self._fill_drafts(self._matchers, rows, drafts, words, legal)

    def _fill_drafts(
        self,
        matchers: Matchers,
        rows: LateRows,
        drafts: list[list[int]],
        words: np.ndarray,
        legal: np.ndarray,
    ) -> None:
        slots = rows.slots.tolist()
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
        matchers, found = self._matchers, tokens.read()
        counts = np.ones(len(rows.slots), np.int64)
        if self._width > 1:
            first = np.cumsum(rows.widths) - rows.widths
            counts = np.add.reduceat((found >= 0).astype(np.int64), first)
            found = found[found >= 0]
        self._host_tokens.hear(rows.slots, counts, found)
        if matchers is not None:
            taken = matchers.advance(step, rows.slots, rows.generations, found, counts)
            for place in matchers.ended[rows.slots].nonzero()[0].tolist():
                heard.ended += int(rows.rows[place]), max(1, int(taken[place]))
            self._tell_failures(matchers, rows, heard)
        if drafts is not None:
            for slot, run in zip(rows.slots.tolist(), drafts.read().tolist(), strict=True):
                self._drafts[slot] = run[: run.index(-1)] if -1 in run else run

    def _note_failures(self, matchers: Matchers) -> None:
        for error in matchers.take_errors():
            self._unsaid[error.slot, error.generation] = error.reason

    def _tell_failures(self, matchers: Matchers, rows: LateRows, heard: Heard) -> None:
        self._note_failures(matchers)
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
