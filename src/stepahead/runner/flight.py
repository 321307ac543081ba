"""What a step's operations leave for each other, and what the host keeps of a step in the air."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from stepahead.device.base import Event, HostArray, Point
from stepahead.plan import LATE, NO_INTS, PromptRows, Result, RowFailure
from stepahead.runner.arrival import Arrival
from stepahead.runner.hidden import HiddenDownload, PoolDownload
from stepahead.runner.logprobs import LogprobDownload, LogprobTensors
from stepahead.runner.stage import LateRows, PromptScore, SampledPart
from stepahead.runner.verify import Asked
from stepahead.sync import Cause, Held, Sync, SyncReason

T = TypeVar("T")


def nothing() -> None:
    """For who is to be told nothing."""


class Once:
    """A call made once, by whoever comes first; who comes second returns when it is over."""

    def __init__(self, fn: Callable[[], None] = nothing) -> None:
        self._fn = fn
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            fn, self._fn = self._fn, nothing  # what it holds is let go
            fn()


@dataclass
class Look:
    """What a step's parts are sampled from, r positions: `states_dev` [r, hidden], `logits_dev`
    float32[r, vocab], `positions_dev` int64[r].  And what they were: `tokens_dev` int64[r], and
    `over_dev` bool[r], which end their rows; None as long as none could."""

    states_dev: Tensor
    logits_dev: Tensor
    positions_dev: Tensor
    tokens_dev: Tensor
    over_dev: Tensor | None = None

    def take(self, part: SampledPart, tokens_dev: Tensor, over_dev: Tensor | None) -> None:
        """What was sampled for a part."""
        if part.at_dev is None:
            self.tokens_dev, self.over_dev = tokens_dev, over_dev
            return
        self.tokens_dev.index_copy_(0, part.at_dev, tokens_dev)
        if over_dev is not None:
            if self.over_dev is None:
                self.over_dev = torch.zeros_like(self.tokens_dev, dtype=torch.bool)
            self.over_dev.index_copy_(0, part.at_dev, over_dev)


@dataclass
class PartBox:
    """What was sampled for a part of a step's rows, and who of the step could not be."""

    tokens_dev: Tensor | None = None
    hidden_dev: Tensor | None = None
    logprobs: LogprobTensors | None = None
    failed: list[RowFailure] = field(default_factory=list)


@dataclass
class StepBox:
    """What a step's operations leave for each other on the device; filled on the forward stream.
    `arrived` holds the hidden states that another stage has left, if one had to; `asked`:
    what the model is asked under drafts; `look`: what late rows are sampled from.  `begin` is
    called before the model, or when that has been launched; then `masks` of late rows have been
    asked for.
    `ends_dev` int64[r]: the place of each row's new token, where the slots are already as long as
    after the step; valid until the next step's model."""

    arrived: list[Tensor] = field(default_factory=list)
    states_dev: Tensor | None = None
    first: PartBox = field(default_factory=PartBox)
    late: PartBox = field(default_factory=PartBox)
    look: Look | None = None
    sums_dev: Tensor | None = None
    lengths_dev: Tensor | None = None
    drafts_dev: Tensor | None = None
    prompts: list[LogprobTensors] = field(default_factory=list)
    asked: Asked | None = None
    begin: Once = field(default_factory=Once)
    masks: Masks | None = None
    ends_dev: Tensor | None = None


def made(value: T | None) -> T:
    """What an operation before has left; AssertionError if it has not run."""
    assert value is not None, "used before the forward ran"
    return value


class Nothing:
    """The tokens of a stage that samples none."""

    def read(self) -> np.ndarray:
        return NO_INTS


@dataclass(frozen=True)
class PartDownload:
    """A part of a step on its way to the host: values that are valid once an event has passed.
    `at` int64[m]: which of the step's positions its tokens are, None for all.  `failed` is valid
    then, too."""

    tokens: HostArray
    logprobs: LogprobDownload | None = None
    hidden: HiddenDownload | None = None
    at: np.ndarray | None = None
    failed: Sequence[RowFailure] = ()

    def fill(self, tokens: np.ndarray) -> None:
        """Puts its tokens where they belong in int32[r]."""
        tokens[slice(None) if self.at is None else self.at] = self.tokens.read()

    @property
    def plain(self) -> bool:
        """Whether it brings nothing but tokens."""
        return self.logprobs is None and self.hidden is None


@dataclass(frozen=True)
class Landing:
    """A part that is there when `event` has passed."""

    event: Event
    part: PartDownload


@dataclass(frozen=True)
class Masks:
    """Those of a step's late positions, once `point` has passed: `words` int32[m, words].  Under
    drafts `legal` int64[2, n]: late decode rows, and how many of their drafts may be.  `known`: the
    tokens before each position, where the logits processor wants them; `waits` rows wait
    for those alone."""

    point: Point
    words: np.ndarray
    legal: np.ndarray | None
    known: list[np.ndarray]
    waits: int

    def done(self) -> bool:
        """Whether they are there."""
        return self.point.done()


class Heard:
    """What the matchers said to a step's late tokens: `ended` and `failed` as in Result, once
    `wait` has returned.

    Either the thread beside hears them, and `point` passes; or they are there already, and `hear`
    is for whoever comes first: who lands them, or that thread, before the next step's masks.
    """

    def __init__(self) -> None:
        self.point: Point | None = None
        self.ended: list[int] = []
        self.failed: list[RowFailure] = []
        self._hear: Callable[[], None] = nothing
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def offer(self, hear: Callable[[], None]) -> None:
        """What `hear` does, once."""
        self._hear = hear

    def ready(self) -> bool:
        """Whether `wait` sleeps for nobody."""
        return self.point is None or self.point.done()

    def hear(self) -> None:
        """Hears them, if nobody has; raises what that raised, whoever did."""
        with self._lock:
            hear, self._hear = self._hear, nothing
            try:
                hear()
            except BaseException as error:
                self._error = error
            if self._error is not None:
                raise self._error

    def wait(self) -> None:
        """Returns when they are heard."""
        if self.point is not None:
            self.point.wait()
        else:
            self.hear()


class LateFlight:
    """The late rows of a step in the air.  `queue` says that they have been given to the device,
    `fail` that they can't be; whoever lands them sees to it that it is one of both."""

    def __init__(self, rows: LateRows, masks: Masks, finish: Callable[[], None]) -> None:
        self.rows = rows
        self._masks = masks
        self.end: Event | None = None
        self._finish = finish
        self._landing: Landing | None = None
        self._start: Event | None = None
        self._heard = Heard()
        self._queued_ns = 0
        self._waited = False  # for masks
        self._error: BaseException | None = None

    @property
    def queued(self) -> bool:
        """Whether the device has them."""
        return self._landing is not None

    def queue(
        self, landing: Landing, forward: tuple[Event, Event], heard: Heard, at_ns: int, waited: bool
    ) -> None:
        """They were given to the device at `at_ns`; `waited`: their masks were waited for."""
        self._start, self.end = forward
        self._heard = heard
        self._queued_ns = at_ns
        self._waited = waited
        self._landing = landing

    def queue_if_there(self) -> None:
        """Gives them to the device if it has not got them, and their masks are there."""
        if not self.queued and self._error is None and self._masks.done():
            self._finish()

    def fail(self, error: BaseException) -> None:
        """They can't be sampled."""
        self._error = error

    def ready(self) -> bool:
        """Whether they have landed, and been heard, or can be at once."""
        return self._landing is not None and self._landing.event.done() and self._heard.ready()

    def follows(self, event: Event) -> bool:
        """Whether they come right behind the others, whose event has passed."""
        if self._landing is None:
            return False
        return self._queued_ns <= event.at_ns() or self._landing.event.done()

    def land(self) -> Landing:
        """Waits for them; raises what the device or a matcher raised."""
        if self._landing is None and self._error is None:
            self._finish()
        if self._error is not None:
            raise self._error
        landing = made(self._landing)
        landing.event.wait()
        self._heard.wait()
        return landing

    def tell(self, result: Result, first_end: Event) -> Result:
        """The result with what came of the grammars, and whether the device stood for masks."""
        syncs, held = result.syncs, result.held
        began_ns, ended_ns = first_end.at_ns(), made(self._start).at_ns()
        if self._waited and began_ns < min(self._queued_ns, ended_ns):
            waits = self._masks.waits
            if len(self.rows.rows) > waits:
                syncs += (Sync(SyncReason.GRAMMAR, len(self.rows.rows) - waits),)
            if waits:
                syncs += (Sync(SyncReason.HOST_PROCESSOR, waits),)
            held += (Held(Cause.MASK_LATE, began_ns, ended_ns),)
        ended = tuple(self._heard.ended)
        failed = (*result.failed, *self._heard.failed)
        return msgspec.structs.replace(result, syncs=syncs, held=held, ended=ended, failed=failed)


@dataclass(eq=False)
class RunnerFlight:
    """A step in the device's hands; `start` and `end` are those of its forward, but for late rows.

    `held` is what held the runner up, `arrival` tells what the device waited for, None if nothing.
    `runs` is told the tokens when they have landed, where a row may bring several of them.
    `positions`: how many are sampled.  Rows that wait for masks are with `late`.
    """

    step: int
    first: Landing
    start: Event
    end: Event
    positions: int
    prompts: tuple[tuple[PromptScore, LogprobDownload], ...]
    pooled: PoolDownload | None
    syncs: tuple[Sync, ...]
    held: tuple[Held, ...]
    arrival: Arrival | None
    received_ns: int
    submitted_ns: int
    width: int = 1
    runs: Callable[[np.ndarray], None] | None = None
    late: LateFlight | None = None
    _told: bool = False  # whether the first part was

    def ready(self) -> bool:
        """Whether `land` would return at once."""
        if self.late is None:
            return self.first.event.done()
        alone = not self._told and not self.late.queued and self._brings_more()
        return self.first.event.done() if alone else self.late.ready()

    def land(self) -> Result:
        """Waits for this step's results; raises what the device raised.  Where rows are late, and
        their masks were not there in time, it is the first part; then it is to be called again."""
        if self.late is None:
            self.first.event.wait()
            return self._whole()
        self.late.queue_if_there()
        if not self._told and self._goes_first():
            self._told = True
            return self._first_part()
        return self._last_part(self.late)

    def _brings_more(self) -> bool:
        """Whether there is anything but late rows."""
        return bool(self.prompts) or self.first.part.at is None or len(self.first.part.at) > 0

    def _goes_first(self) -> bool:
        if not self._brings_more():
            return False
        self.first.event.wait()
        assert self.late is not None
        # alternatives of rows may be many and few: two tables, which travel each by itself
        return not self.first.part.plain or not self.late.follows(self.first.event)

    def _whole(self) -> Result:
        tokens = np.empty(self.positions, np.int32)
        self.first.part.fill(tokens)
        if self.runs is not None:
            self.runs(tokens)
        return self._result(tokens, self.first, self.end, told=False)

    def _first_part(self) -> Result:
        tokens = np.full(self.positions, LATE, np.int32)
        self.first.part.fill(tokens)
        first = self.first.part
        return Result(
            self.step,
            tokens,
            logprobs=first.logprobs.read() if first.logprobs else None,
            prompt_logprobs=self._scores(),
            hidden=first.hidden.read() if first.hidden else None,
            pooled=self.pooled.read() if self.pooled else None,
            width=self.width,
            part="first",
            failed=tuple(first.failed),
        )

    def _last_part(self, late: LateFlight) -> Result:
        landing = late.land()
        tokens = np.full(self.positions, LATE, np.int32)
        self.first.part.fill(tokens)
        landing.part.fill(tokens)
        if self.runs is not None:
            self.runs(tokens)
        if self._told:
            tokens[self.first.part.at] = LATE
        result = self._result(tokens, landing, made(late.end), told=self._told)
        if self.first.part.failed and not self._told:
            failed = (*self.first.part.failed, *result.failed)
            result = msgspec.structs.replace(result, failed=failed)
        return late.tell(result, self.end)

    def _scores(self) -> tuple[PromptRows, ...]:
        return tuple(PromptRows(s.slot, s.start, download.read()) for s, download in self.prompts)

    def _result(self, tokens: np.ndarray, landing: Landing, end: Event, told: bool) -> Result:
        start_ns = self.start.at_ns()
        return Result(
            self.step,
            tokens,
            start_ns,
            end.at_ns(),
            landing.part.logprobs.read() if landing.part.logprobs else None,
            () if told else self._scores(),
            hidden=landing.part.hidden.read() if landing.part.hidden else None,
            syncs=self.syncs,
            received_ns=self.received_ns,
            submitted_ns=self.submitted_ns,
            held=self.held + self.arrival.held(start_ns) if self.arrival else self.held,
            pooled=self.pooled.read() if self.pooled and not told else None,
            width=self.width,
            part="last" if told else "whole",
            failed=tuple(landing.part.failed),
        )
