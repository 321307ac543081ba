"""The engine: a scheduler, a loop, an executor and the books, put together and stepped.

One thread calls it, but for `close`, which is for any.  Roles (offline, server) differ in who calls
`add` and who reads `Outputs`.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
from msgspec.structs import replace

from stepahead import __version__
from stepahead.config import EngineConfig, Resolved
from stepahead.errors import EngineClosed, EngineError, InvalidParameter
from stepahead.loop.base import Executor, LoopCore
from stepahead.loop.batch_queue import batch_queue_step
from stepahead.loop.overlap import overlap_step
from stepahead.loop.serial import serial_step
from stepahead.observe.books import Books
from stepahead.observe.observer import Observer
from stepahead.observe.stages import Stage
from stepahead.scheduler.policy import Limits
from stepahead.scheduler.scheduler import Scheduler
from stepahead.scheduler.stop import StopTable, Vocabulary
from stepahead.structured import Grammar
from stepahead.sync import SyncCounts
from stepahead.types import (
    DraftCounts,
    Finish,
    FinishReason,
    Load,
    Outputs,
    Request,
    SamplingParams,
    as_prompt,
)

_STEPS: dict[str, Callable[[LoopCore], Outputs | None]] = {
    "serial": serial_step,
    "overlap": overlap_step,
    "batch-queue": batch_queue_step,
}
_NO_RIDS = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)
_DELIVER, _IDLE = Stage.DELIVER, Stage.IDLE  # members are slow to look up
_DROP_S = 1.0  # most that ending all requests takes: nothing in it waits for a device


def _about(resolved: Resolved) -> dict[str, str | int]:
    config = resolved.config
    return {
        "version": __version__,
        "model": config.model,
        "loop": config.loop,
        "depth": config.steps_ahead,
        "fence": config.fence,
        "executor": config.executor,
        "device": config.device,
        "max_rows": config.max_rows,
        "pages": resolved.pages - 1,
        "page_size": config.page_size,
    }


def limits_of(resolved: Resolved) -> Limits:
    """The scheduler's sizes from the effective configuration."""
    config = resolved.config
    return Limits(
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        page_size=config.page_size,
        num_pages=resolved.pages,
        num_slots=config.num_slots,
        model_len=resolved.model_len,
        relay=config.relay,
        prefix_cache=config.prefix_cache,
        serial_prefill=config.serial_prefill,
        stages=config.pipeline_stages,
        turns=min(config.pipeline_stages, config.steps_ahead),
        width=config.step_width,
        debug=config.debug,
    )


class Engine:
    """Takes requests, steps, gives outputs.  Every request gets exactly one terminal message."""

    def __init__(
        self,
        resolved: Resolved,
        executor: Executor,
        vocabulary: Vocabulary,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`clock_ns` is the clock of the device times in what the executor's flights bring."""
        self.resolved = resolved
        facts = resolved.facts
        stops = StopTable(facts.vocab_size, facts.eos_ids, vocabulary)
        self.observer = Observer(clock_ns, _about(resolved))
        self.scheduler = Scheduler(limits_of(resolved), stops, self.observer.requests)
        self._executor = executor
        config: EngineConfig = resolved.config
        depth = config.steps_ahead
        self._core = LoopCore(self.scheduler, executor, depth, self.observer)
        self._step = partial(_STEPS[config.loop], self._core)
        self._ended: list[Finish] = []  # terminal messages that no step brought
        self._failure: EngineError | None = None
        self._closed = False
        # Held by whoever is at work on the scheduler: `close` may come from another thread, or from
        # a signal's handler in the middle of a step, and must neither wait for it nor disturb it.
        self._turn = threading.Lock()
        self._rids = 0
        self._beside = ExitStack()
        self._beside.callback(self.observer.garbage.close)

    @property
    def books(self) -> Books:
        """Where the host's and the device's time went."""
        return self.observer.books

    @property
    def syncs(self) -> SyncCounts:
        """Every pull back to serial work."""
        return self.observer.syncs

    @property
    def flights(self) -> int:
        """Steps launched and not yet retired."""
        return self._core.flights

    def load(self) -> Load:
        """What there is to do, and to do it with, now; for the engine's thread, or as a question to
        the observer."""
        return self.scheduler.measure_load(self.scheduler.load.step)

    def draft_counts(self) -> DraftCounts:
        """What came of drafts since the start; as `load` to be asked for."""
        return self.scheduler.draft_counts()

    # --- requests ---------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int] | np.ndarray,
        params: SamplingParams,
        wait: bool = True,
        grammar: Grammar | None = None,
    ) -> list[int]:
        """Takes a prompt in; one request id for each of its `n` choices.

        `grammar` is what the answers keep to, compiled from `params.structured_outputs` where the
        request was read.  RequestError when it is refused: then nothing of it runs.  With
        `wait=False` PoolFull when it can't be held at once.
        """
        self._check_open()
        self._check_grammar(params, grammar)
        if params.structured_outputs is not None:
            params = replace(params, structured_outputs=None)  # no runner reads it
        ids = as_prompt(prompt, self.resolved.facts.vocab_size)
        self._check_ids(params)
        with self._mail():
            self._check_open()
            requests = [self._request(ids, params, i, grammar) for i in range(params.n)]
            self.scheduler.add(requests, wait)
            # counted when taken in: a refusal must not change the noise of those that come after
            self._rids += params.n
            for request in requests:
                self.observer.requests.arrived(request.rid, len(ids))
        return [request.rid for request in requests]

    def _request(
        self, prompt: np.ndarray, params: SamplingParams, choice: int, grammar: Grammar | None
    ) -> Request:
        seed = params.seed
        if seed is None:  # its own noise, the same in every run of this engine's seed
            seed = (self.resolved.config.seed * 0x9E3779B97F4A7C15 + self._rids + 1) % (1 << 63)
        if choice and params.prompt_logprobs is not None:
            # the prompt is the same for all choices: once is enough
            params = replace(params, prompt_logprobs=None)
        return Request(self._rids + choice, prompt, params, seed, choice, grammar)

    def _check_grammar(self, params: SamplingParams, grammar: Grammar | None) -> None:
        stages = self.resolved.config.pipeline_stages
        words = ""
        if grammar is not None and stages > 1:
            words = (
                f"no answer can keep to a grammar with pipeline_stages={stages}; ask for free "
                "text, or start the engine with one stage"
            )
        elif grammar is not None and not self.resolved.facts.eos_ids:
            words = "the model has no end of sequence, so that no grammar could end; ask for text"
        elif grammar is None and params.structured_outputs is not None:
            words = "structured_outputs must be compiled first, with a GrammarCompiler"
        if words:
            raise InvalidParameter(words, "structured_outputs")

    def _check_ids(self, params: SamplingParams) -> None:
        size = self.resolved.facts.vocab_size
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("logit_bias", params.logit_bias or ()),
        ):
            for token in ids:
                if token >= size:
                    raise InvalidParameter(
                        f"{name} names token {token}; the vocabulary is 0..{size - 1}", name
                    )

    def abort(self, rid: int) -> None:
        """Ends a request; its terminal message comes with the next step.  Unknown ids are ignored:
        the request may just have ended."""
        with self._mail():
            finish = self.scheduler.abort(rid)
            if finish is not None:
                self._ended.append(finish)

    @contextmanager
    def _mail(self) -> Generator[None]:
        """The host takes something in; then it is at what it was before, but that an engine with
        requests has work to do: who has the thread keeps it from it."""
        self._take_turn()
        try:
            with self.observer.working:
                before = self.books.stage
                self.books.enter(Stage.MAIL)
                try:
                    yield
                finally:
                    waiting = before is _IDLE and self.scheduler.has_work
                    self.books.rest(_DELIVER if waiting else before)
        finally:
            self._turn.release()

    # --- steps ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        # In this order: while another thread's close moves requests from the first to the last,
        # they are in neither, but the turn is taken.
        return self.scheduler.has_work or self._turn.locked() or bool(self._ended)

    def step(self) -> Outputs | None:
        """Runs the loop once.  What it brought, or None: a launch without a landing.

        A failure of the runner ends every request with `error`; the engine can only be closed then.
        After `close` it runs nothing, and tells the ends of what still ran; then EngineClosed.
        """
        self._take_turn()
        garbage = self.observer.garbage
        try:
            garbage.automatic = gc.isenabled()
            gc.disable()  # or it may collect between a step's end and the next launch
            with self.observer.working:
                running = not self._closed and self._failure is None
                if not running and not self._rest():
                    self._check_open()
                outputs = self._with_ended(self._run() if running else None)
                self._take_down(outputs)
                self.observer.answer()
            return outputs
        finally:
            if garbage.automatic:
                gc.enable()
            self._turn.release()

    def _rest(self) -> list[Finish]:
        """What an engine that runs no more has still to tell."""
        if self._closed:
            self._drop("abort")
        return self._ended

    def _run(self) -> Outputs | None:
        outputs = None
        try:
            outputs = self._step()
        except EngineError as error:
            if not self._closed:  # else it is how a close ends the wait of this step
                self._failure = error
                self._drop("error", str(error))
        if self.scheduler.has_work:
            self.books.enter(_DELIVER)
        else:
            self.books.rest(_IDLE)
        return outputs

    def _take_down(self, outputs: Outputs | None) -> None:
        if outputs is None:
            return
        log = self.observer.requests
        requests = outputs.rids if outputs.requests is None else outputs.requests
        log.delivered(requests, outputs.first, len(outputs.rids) - len(requests))
        for finish in outputs.finishes:
            log.ended(finish.rid, finish.reason, len(finish.tokens))

    def _with_ended(self, outputs: Outputs | None) -> Outputs | None:
        if not self._ended:
            return outputs
        ended = tuple(self._ended)
        self._ended.clear()
        if outputs is None:
            return Outputs(-1, _NO_RIDS, _NO_TOKENS, finishes=ended)
        return replace(outputs, finishes=outputs.finishes + ended)

    def _take_turn(self) -> None:
        """EngineError if a step is on, in another thread or below on this one's stack."""
        if self._turn.acquire(blocking=False):
            return
        # a close by another thread holds it for a moment; anybody else has no business here
        if not self._closed or not self._turn.acquire(timeout=_DROP_S):
            raise EngineError(
                "the engine was called while another call was at work in it; one thread drives "
                "an engine: give each thread its own, or hand requests to the one that steps"
            )

    # --- the end ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed; build a new one")
        if self._failure is not None:
            raise EngineClosed(
                f"the engine has failed ({self._failure}); close it, build a new one"
            )

    @property
    def failure(self) -> EngineError | None:
        """What ended the engine, if anything did."""
        return self._failure

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Ends what still runs with `abort`, then the executor.  Idempotent; for any thread.

        Flights in the air are dropped, not landed: a device may be stuck.  So it takes as long as
        the executor's `close`.  Terminal messages are told by `step`, as ever.  A call that is at
        work meanwhile is left alone, and the next `step` ends the requests; a step that waits comes
        back at once, unless its executor computes in the caller's own thread.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._turn.acquire(blocking=False):
                try:
                    self._drop("abort")
                finally:
                    self._turn.release()
        finally:
            with self._beside:
                self._executor.close()

    def on_close(self, farewell: Callable[[], object]) -> None:
        """Calls this at the end of `close`, in its thread: for what lives beside the engine."""
        self._beside.callback(farewell)

    def _drop(self, reason: FinishReason, error: str = "") -> None:
        """Nothing is in the air any more, and every request has its end."""
        self._core.forget()
        self._ended += self.scheduler.drop_all(reason, error)
