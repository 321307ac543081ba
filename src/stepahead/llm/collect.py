"""Turns the engine's outputs into answers: whole ones, and pieces for who wants them as they come.

For a request that is not streamed nothing is done per token: its terminal message has them all.
Knows outputs and texts; steps no engine, writes nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stepahead.llm.answer import Alternatives, Answer, alternatives
from stepahead.llm.prompts import Prompt
from stepahead.text.texts import Texts
from stepahead.types import (
    CompletionOutput,
    Finish,
    FinishReason,
    HiddenRows,
    LogprobRows,
    Outputs,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    StateSums,
)


class Delta(msgspec.Struct, frozen=True):  # one a token: a dataclass takes ten times as long
    """What is new of one choice of a streamed request; the last one has a finish reason.

    `logprobs` are those of `token_ids`, None unless asked for; hidden states come with the whole
    answer only.  `text` may be empty while it is held back.  `prompt_logprobs` are those of the
    prompt, if asked for: whole with the first choice's first delta, unless it was aborted.
    """

    key: Any
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Alternatives] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Alternatives | None] | None = None


@dataclass(frozen=True)
class News:
    """What one step brought: `deltas` of streamed requests, and `done`, all requests that ended."""

    deltas: list[Delta] = field(default_factory=list)
    done: list[tuple[Any, RequestOutput]] = field(default_factory=list)


class _Asked:
    """A prompt whose choices are not all ended."""

    def __init__(
        self, key: Any, prompt: Prompt, answers: Sequence[Answer], arrival_s: float
    ) -> None:
        self.key = key
        self.prompt = prompt
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.left = len(answers)
        self.outputs: list[CompletionOutput | None] = [None] * len(answers)
        self.cached_tokens = 0
        wanted = answers[0].params.prompt_logprobs is not None
        self.prompt_logprobs: list[Alternatives | None] | None = (
            [None] * len(prompt.ids) if wanted else None
        )

    def output(self, finished_s: float) -> RequestOutput:
        """All choices, in their order."""
        return RequestOutput(
            request_id=str(self.key),
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.ids,
            outputs=[output for output in self.outputs if output is not None],
            prompt_logprobs=self.prompt_logprobs,
            metrics=RequestMetrics(self.arrival_s, self.first_token_s, finished_s),
            num_cached_tokens=self.cached_tokens,
        )


class Collector:
    """Per-request state between `open` and the last choice's end.  For one thread."""

    def __init__(self, texts: Texts, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._texts = texts
        self._clock_s = clock_s
        self._choices: dict[int, tuple[_Asked, Answer]] = {}  # by request id
        self._streamed = 0

    def __len__(self) -> int:
        """Choices that have not ended."""
        return len(self._choices)

    def open(
        self,
        key: Any,
        prompt: Prompt,
        params: SamplingParams,
        rids: Sequence[int],
        streaming: bool = False,
    ) -> None:
        """Expects outputs for `rids`, the choices of one prompt, as `Engine.add` gave them."""
        answers = [
            Answer(self._texts, prompt, params, index, streaming) for index in range(len(rids))
        ]
        asked = _Asked(key, prompt, answers, self._clock_s())
        for rid, answer in zip(rids, answers, strict=True):
            self._choices[rid] = (asked, answer)
        self._streamed += streaming * len(rids)

    def rids(self) -> list[int]:
        """Request ids whose terminal message has not come."""
        return list(self._choices)

    def forget(self) -> None:
        """Expects nothing any more."""
        self._choices.clear()
        self._streamed = 0

    def take(self, outputs: Outputs) -> News:
        """Applies what a step brought; ids that were never opened are passed over."""
        now_s = self._clock_s()
        for rid in outputs.first:
            self._first_token(rid, now_s)
        if outputs.logprobs is not None:
            self._take_logprobs(outputs, outputs.logprobs)
        if outputs.hidden is not None:
            self._take_hidden(outputs, outputs.hidden)
        if outputs.pooled is not None:
            self._take_pooled(outputs.pooled)
        for rows in outputs.prompt_logprobs:
            self._take_prompt_logprobs(rows)
        news = News()
        if self._streamed:
            self._take_tokens(outputs, news)
        for finish in outputs.finishes:
            self._take_finish(finish, now_s, news)
        return news

    def _first_token(self, rid: int, now_s: float) -> None:
        if (found := self._choices.get(rid)) and found[0].first_token_s is None:
            found[0].first_token_s = now_s

    def _take_logprobs(self, outputs: Outputs, values: LogprobRows) -> None:
        rids = outputs.rids[values.rows].tolist()
        owners = [self._choices.get(rid) for rid in rids]
        widths = [owner[1].params.logprobs or 0 if owner else 0 for owner in owners]
        tokens = outputs.tokens[values.rows].tolist()
        found = alternatives(values, tokens, widths, self._texts)
        for owner, row in zip(owners, found, strict=True):
            if owner and owner[1].logprobs is not None:
                owner[1].logprobs.append(row)

    def _take_hidden(self, outputs: Outputs, hidden: HiddenRows) -> None:
        states = hidden.values.reshape(len(hidden.rows), hidden.width)
        for rid, state in zip(outputs.rids[hidden.rows].tolist(), states, strict=True):
            owner = self._choices.get(rid)
            if owner and owner[1].hidden is not None:
                # a view would hold on to the states of all others in the step
                owner[1].hidden.append(state.copy())

    def _take_pooled(self, pooled: StateSums) -> None:
        owners, starts, counts = (
            column.tolist() for column in (pooled.owners, pooled.starts, pooled.counts)
        )
        sums = pooled.sums.reshape(len(owners), pooled.width)
        for place, rid in enumerate(owners):
            owner = self._choices.get(rid)
            if owner and owner[1].pool is not None:
                owner[1].pool.add(starts[place], counts[place], sums[place])

    def _take_prompt_logprobs(self, rows: PromptLogprobs) -> None:
        owner = self._choices.get(rows.rid)
        if owner is None or owner[1].index or owner[0].prompt_logprobs is None:
            return
        asked, answer = owner
        places = [rows.start + row for row in rows.values.rows.tolist()]
        widths = [answer.params.prompt_logprobs or 0] * len(places)
        tokens = [asked.prompt.ids[place] for place in places]
        # by place: after a preemption the same ones come again
        for place, row in zip(
            places, alternatives(rows.values, tokens, widths, self._texts), strict=True
        ):
            owner[0].prompt_logprobs[place] = row

    def _take_tokens(self, outputs: Outputs, news: News) -> None:
        rids = outputs.rids.tolist()
        last: dict[int, int] = {}
        if ending := {finish.rid for finish in outputs.finishes}:
            last = {rid: place for place, rid in enumerate(rids) if rid in ending}
        owner_of, tell = self._choices.get, news.deltas.append
        for at, (rid, token) in enumerate(zip(rids, outputs.tokens.tolist(), strict=True)):
            owner = owner_of(rid)
            if owner is None or not owner[1].streaming or last.get(rid) == at:
                continue  # the last token is told with the end: it may be cut
            asked, answer = owner
            # under drafts a step brings several tokens, and the rows of all of them are there
            place = answer.told_tokens
            logprobs = None if answer.logprobs is None else answer.logprobs[place : place + 1]
            text = answer.push(token)
            prompt = asked.prompt_logprobs
            tell(Delta(asked.key, answer.index, text, [token], logprobs, prompt_logprobs=prompt))

    def _take_finish(self, finish: Finish, now_s: float, news: News) -> None:
        owner = self._choices.pop(finish.rid, None)
        if owner is None:
            return
        asked, answer = owner
        told = answer.told_tokens
        output, rest = answer.end(finish)
        asked.outputs[answer.index] = output
        asked.left -= 1
        if answer.index == 0:
            asked.cached_tokens = finish.cached_tokens
        if answer.streaming:
            self._streamed -= 1
            news.deltas.append(_last_delta(asked, output, rest, told))
        if not asked.left:
            news.done.append((asked.key, asked.output(now_s)))


def _last_delta(asked: _Asked, output: CompletionOutput, rest: str, told: int) -> Delta:
    return Delta(
        asked.key,
        output.index,
        rest,
        output.token_ids[told:],
        None if output.logprobs is None else output.logprobs[told:],
        output.finish_reason,
        output.stop_reason,
        asked.prompt_logprobs,
    )
