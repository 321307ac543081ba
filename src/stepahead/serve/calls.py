"""One HTTP request's answers while they come.  Knows deltas and ends, no engine and no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from stepahead.llm.collect import Delta
from stepahead.llm.prompts import Prompt
from stepahead.serve.refusal import Refusal
from stepahead.types import RequestOutput, SamplingParams


@dataclass(eq=False)
class Part:
    """One prompt of a call: `rids` are its choices' in the engine, once that has taken it."""

    call: Call
    place: int
    prompt: Prompt
    rids: tuple[int, ...] = ()
    settled: bool = False  # taken or refused
    ended: bool = False

    def __str__(self) -> str:
        return self.call.label


class Call:
    """For the front's loop alone.

    Whoever answers the client waits with `settled` until the engine has said whether it takes the
    prompts, and then with `news` for what comes.  `error` is why there will be no (more) answer.
    """

    def __init__(
        self, label: str, prompts: Sequence[Prompt], params: SamplingParams, streaming: bool
    ) -> None:
        self.label = label
        self.params = params
        self.streaming = streaming
        self.parts = [Part(self, place, prompt) for place, prompt in enumerate(prompts)]
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self.error: Refusal | None = None
        self.cancelled = False
        self.told_s = 0.0  # when the client last heard something
        self.deadline: asyncio.TimerHandle | None = None
        self._running = len(prompts)  # parts that have not ended; asked for with every token
        self._items: list[tuple[int, Delta]] = []
        self._ping = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def choices(self) -> int:
        """Choices that the engine has, or will have, of it."""
        return self.params.n * len(self.parts)

    @property
    def ended(self) -> bool:
        """Whether nothing of it is in the engine any more."""
        return not self._running

    @property
    def over(self) -> bool:
        """Whether nothing more is to be told."""
        return self.error is not None or not self._running

    @property
    def unread(self) -> bool:
        """Whether something came that nobody has read."""
        return bool(self._items)

    def rids(self) -> list[int]:
        """Request ids in the engine, of parts that have not ended."""
        return [rid for part in self.parts if not part.ended for rid in part.rids]

    async def settled(self) -> None:
        """Waits until every prompt was taken; Refusal where one was not."""
        while self.error is None and not all(part.settled for part in self.parts):
            await self._wait()
        if self.error is not None:
            raise self.error

    async def news(self) -> list[tuple[int, Delta]]:
        """What has come since: deltas with their prompt's place.

        Empty when nothing came for so long that the client should be told we are still there, or
        when it is `over`.
        """
        while not self._items and not self.over and not self._ping:
            await self._wait()
        self._ping = False
        items = self._items
        self._items = []
        return items

    async def answers(self) -> list[RequestOutput]:
        """All outputs, whole; Refusal."""
        while not self.over:
            await self._wait()
        if self.error is not None:
            raise self.error
        return [output for output in self.outputs if output is not None]

    async def _wait(self) -> None:
        assert self._waiter is None, "one waits for a call"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Something has changed for who waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, part: Part) -> None:
        """Nothing of this prompt is in the engine any more."""
        part.ended = True
        self._running -= 1
        self.wake()

    def put(self, place: int, delta: Delta) -> None:
        """A delta has come."""
        self._items.append((place, delta))
        self.wake()

    def ping(self) -> None:
        """Nothing has come for a while."""
        self._ping = True
        self.wake()

    def fail(self, error: Refusal) -> None:
        """There will be no more; the first reason counts."""
        if self.error is None:
            self.error = error
        self.wake()
