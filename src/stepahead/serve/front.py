"""The front's end of the channel: calls in, what each step brought handed to whom it is for.

All on one asyncio loop but for tokenisation, which has threads of its own.  Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from stepahead.llm.collect import Collector
from stepahead.llm.prompts import Prompt
from stepahead.serve.calls import Call, Part
from stepahead.serve.messages import (
    AskPage,
    Cancel,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    Page,
    Ready,
    Refused,
    Step,
    Submit,
    Taken,
    ToEngine,
)
from stepahead.serve.refusal import Refusal, bad_request, not_now, refusal_named, too_many
from stepahead.text.texts import Texts
from stepahead.types import SamplingParams

T = TypeVar("T")
_THREADS = 2  # that tokenize: a prompt of a hundred thousand tokens must not hold up all others


def _engine_failed(words: str) -> Refusal:
    return not_now(f"the engine has failed: {words}", "engine_failed")


def _failed(words: str, of_engine: bool) -> Refusal:
    if of_engine:
        return _engine_failed(words)
    return Refusal(500, f"the answer could not be made: {words}", "answer_failed")


class Wire(Protocol):
    """Where messages go."""

    def send(self, message: ToEngine) -> None:
        """Hands it over, and never waits."""
        ...


class Front:
    """Calls that are open, and the engine as far as it has told of itself."""

    def __init__(self, texts: Texts, max_waiting: int, request_timeout_s: float | None) -> None:
        self.texts = texts
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.draining = False
        self.calls: set[Call] = set()
        self.open_choices = 0  # that the engine has or will have, exactly
        self._max_waiting = max_waiting
        self._timeout_s = request_timeout_s
        self._collector = Collector(texts)
        self._parts: dict[int, Part] = {}  # that the engine has not said yes or no to, by key
        self._asked: dict[int, asyncio.Future[Page | Flushed]] = {}
        self._keys = itertools.count(1)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="stepahead-text")
        self._wire: Wire | None = None
        self.on_change: Callable[[], None] = lambda: None  # ready, failed, or a call has ended

    def connect(self, wire: Wire) -> None:
        """From now on there is an engine behind it, which is not ready yet; calls of one before it
        have ended."""
        self._wire = wire
        self.ready = self.failure = None

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, message: ToEngine) -> None:
        if self._wire is not None and self.failure is None:
            # an engine that is gone is told of by the loop, to everybody at once
            with contextlib.suppress(OSError, ValueError):
                self._wire.send(message)

    # --- calls --------------------------------------------------------------------------------

    def check_room(self, choices: int, param: str = "n") -> None:
        """Refusal where so many more choices can't be taken now, decided on exact counts; they can
        never be, if it is `param` that asks for too many."""
        ready = self.check_ready()
        most = ready.max_rows + self._max_waiting
        if choices > most:
            raise bad_request(
                f"{choices} choices in one request; at most {most} are taken", param, "too_many"
            )
        if self.open_choices + choices > most:
            raise too_many("the server is full at the moment; try again later")

    def check_lengths(self, prompts: Sequence[Prompt]) -> None:
        """Refusal where a prompt can never be held: it need not cross to the engine for that."""
        most = self.check_ready().model_len
        for prompt in prompts:
            if len(prompt.ids) >= most:
                raise bad_request(
                    f"the prompt has {len(prompt.ids)} tokens; the model takes {most} in all, so "
                    "at least one must be left for the output",
                    "prompt",
                    "context_length_exceeded",
                )

    def check_ready(self) -> Ready:
        """What the engine said of itself; Refusal while it does not take requests."""
        if self.failure is not None:
            raise _engine_failed(self.failure)
        if self.draining:
            raise not_now("the server is about to end and takes no more requests", "draining")
        if self.ready is None:
            raise not_now("the model is being loaded", "loading")
        return self.ready

    async def off_loop(self, fn: Callable[[], T]) -> T:
        """What `fn` gives, in a thread: texts only, nothing of the front's own."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn)

    def begin(
        self, label: str, prompts: Sequence[Prompt], params: SamplingParams, streaming: bool
    ) -> Call:
        """Hands prompts to the engine."""
        call = Call(label, prompts, params, streaming)
        # what the grammars of the prompts hold is said twice else
        sent = replace(params, structured_outputs=None)
        keyed = [(next(self._keys), part) for part in call.parts]
        for key, part in keyed:
            # before it counts: one that can't be sent would be waited for without an end
            ids = np.array(part.prompt.ids, np.int32)
            self._send(Submit(key, ids, sent, part.prompt.grammar))
        self._parts.update(keyed)
        loop = asyncio.get_running_loop()
        call.told_s = loop.time()
        self.calls.add(call)
        self.open_choices += call.choices
        if self._timeout_s is not None:
            call.deadline = loop.call_later(self._timeout_s, self._expire, call)
        return call

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more.  Its rows go when the engine hears of it."""
        # the ids of a call that an engine took along with it may be somebody else's by now
        if not call.cancelled and call in self.calls:
            call.cancelled = True
            if rids := call.rids():
                self._send(Cancel(np.array(rids, np.int64)))

    def _expire(self, call: Call) -> None:
        if not call.over:
            words = f"the request was not answered within {self._timeout_s:g} s"
            call.fail(Refusal(504, words, "request_timeout"))
            self.cancel(call)

    def abort(self, label: str | None) -> int:
        """Ends the calls of this label, or all; how many.  Their clients hear `abort`."""
        found = [call for call in self.calls if label in (None, call.label) and not call.ended]
        for call in found:
            self.cancel(call)
        return len(found)

    def ping(self, silent_s: float) -> None:
        """Has the streams told that they live which have heard nothing for so long."""
        before_s = asyncio.get_running_loop().time() - silent_s
        for call in self.calls:
            if call.streaming and call.told_s <= before_s:
                call.ping()

    async def page(self, path: str, query: str, accept_encoding: str) -> Page:
        """What the engine shows of itself at a path; Refusal."""
        found = await self._ask(lambda key: AskPage(key, path, query, accept_encoding))
        assert isinstance(found, Page)
        return found

    async def flush_cache(self) -> int:
        """Forgets cached pages; how many; Refusal."""
        found = await self._ask(Flush)
        assert isinstance(found, Flushed)
        return found.pages

    async def _ask(self, message: Callable[[int], AskPage | Flush]) -> Page | Flushed:
        if self.failure is not None or self.ready is None:
            self.check_ready()
        key = next(self._keys)
        future: asyncio.Future[Page | Flushed] = asyncio.get_running_loop().create_future()
        self._asked[key] = future
        try:
            self._send(message(key))
            return await future
        finally:
            del self._asked[key]

    # --- what the engine says -------------------------------------------------------------------

    def take(self, message: FromEngine) -> None:
        """Applies a message; nothing counts that comes behind an engine's failure."""
        if self.failure is not None:
            return
        if isinstance(message, Step):
            self._take_step(message)
        elif isinstance(message, Taken):
            self._take_taken(message)
        elif isinstance(message, Refused):
            self._take_refused(message)
        elif isinstance(message, Ready):
            self.ready = message
            self.on_change()
        elif isinstance(message, Failed):
            self.fail(message.message)
        elif (future := self._asked.get(message.key)) is not None and not future.done():
            future.set_result(message)

    def _take_step(self, step: Step) -> None:
        # an engine that has failed runs no step any more; an error in one is a row's alone
        of_engine = step.outputs.step < 0
        news = self._collector.take(step.outputs)
        self.open_choices -= len(step.outputs.finishes)
        for delta in news.deltas:
            part: Part = delta.key
            if delta.finish_reason != "error":  # that is told below
                part.call.put(part.place, delta)
        for key, output in news.done:
            part = key
            part.call.outputs[part.place] = output
            if errors := [choice.error for choice in output.outputs if choice.error]:
                part.call.fail(_failed(errors[0], of_engine))
            self._end(part)
        failed = next((end for end in step.outputs.finishes if end.reason == "error"), None)
        if failed is not None and of_engine:
            # the engine's last message but for its farewell: a client whose stream tells of the
            # failure must not find the server healthy
            self.fail(failed.error)

    def _take_taken(self, taken: Taken) -> None:
        part = self._parts.pop(taken.key)
        part.rids, part.settled, call = taken.rids, True, part.call
        self._collector.open(part, part.prompt, call.params, taken.rids, call.streaming)
        if call.cancelled or call.error is not None:
            self._send(Cancel(np.array(taken.rids, np.int64)))
        call.wake()

    def _take_refused(self, refused: Refused) -> None:
        part = self._parts.pop(refused.key)
        part.settled = True
        self.open_choices -= part.call.params.n
        part.call.fail(refusal_named(refused.kind, refused.message, refused.param))
        self._end(part)
        self.cancel(part.call)  # its other prompts

    def _end(self, part: Part) -> None:
        part.call.end(part)
        if part.call.ended:
            if part.call.deadline is not None:
                part.call.deadline.cancel()
            self.calls.discard(part.call)
            self.on_change()

    def fail(self, words: str) -> None:
        """The engine is gone: every call ends here."""
        if self.failure is not None:
            return
        self.failure = words
        refusal = _engine_failed(words)
        for call in list(self.calls):
            call.fail(refusal)
        self.calls.clear()
        self._parts.clear()
        self._collector.forget()
        self.open_choices = 0
        for future in self._asked.values():
            if not future.done():
                future.set_exception(refusal)
        self.on_change()
