"""One choice's answer while it comes: tokens, what comes with them, text cut where it must stop.

Knows one request; no engine, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stepahead.llm.prompts import Prompt
from stepahead.text.texts import Texts, TextStream, decode_after
from stepahead.types import (
    CompletionOutput,
    Finish,
    Logprob,
    LogprobRows,
    SamplingParams,
)

Alternatives = dict[int, Logprob]


class Pool:
    """A prompt's hidden states while they come, chunk by chunk."""

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._sum: np.ndarray | None = None
        self._count = self._end = 0

    def add(self, start: int, count: int, sums: np.ndarray) -> None:
        """`sums` float64[hidden] over so many positions from `start`."""
        if self._sum is None or start != self._end:  # the first, or one that was preempted begins
            self._sum, self._count = np.zeros_like(sums), 0
        self._sum += sums
        self._count += count
        self._end = start + count

    def mean(self) -> np.ndarray | None:
        """float32[hidden], None unless the prompt came to its end."""
        if self._sum is None or self._end != self._prompt_len:
            return None
        return (self._sum / self._count).astype(np.float32)


class Answer:
    """What has come for one choice.  With `streaming` its text is told piece by piece."""

    def __init__(
        self,
        texts: Texts,
        prompt: Prompt,
        params: SamplingParams,
        index: int,
        streaming: bool,
    ) -> None:
        self.index = index
        self.params = params
        self.logprobs: list[Alternatives] | None = None if params.logprobs is None else []
        self.hidden: list[np.ndarray] | None = [] if params.return_hidden_states else None
        self.pool = Pool(len(prompt.ids)) if params.pooling is not None else None
        self.told_tokens = 0
        self._texts = texts
        self._prompt = prompt
        self._stops = () if params.include_stop_str_in_output else params.stops
        self.streaming = streaming
        self._stream: TextStream | None = None
        self._pieces: list[str] = []  # all text that came out of the stream
        self._told = 0  # characters
        self._held = ""  # the end of it that is not told: a stop string may begin there
        form = prompt.form
        self._skips = params.skip_special_tokens
        self._left_out: frozenset[int] = frozenset()
        if self._skips and form is not None and form.shown_ids:
            # tags are told: the decoder leaves nothing out, and we all special tokens but those
            self._skips, self._left_out = False, texts.special_ids - form.shown_ids
        if streaming:
            self._stream = texts.stream(self._skips, prompt.ids)

    def push(self, token: int) -> str:
        """Takes a token that is not the last; the text that can be told now."""
        assert self._stream is not None, "only a streaming answer is told piece by piece"
        self.told_tokens += 1
        text = self._stream.push(self._shown((token,)))
        self._pieces.append(text)
        if self._stops:
            text = self._hold(self._held + text)
        self._told += len(text)
        return text

    def _hold(self, text: str) -> str:
        """The part of `text` that can be told.

        What was told before needs no look: no stop string could begin in it, or it would be held.
        """
        sizes = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        )
        end = len(text) - max(sizes, default=0)
        self._held = text[end:]
        return text[:end]

    def end(self, finish: Finish) -> tuple[CompletionOutput, str]:
        """The whole answer, and the text of it that was not told yet."""
        ids: list[int] = finish.tokens.tolist()
        text = self._cut(self._text(ids, finish), finish)
        logprobs, form = self.logprobs, self._prompt.form
        total = None if logprobs is None else _total(logprobs, ids)
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=ids,
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            error=finish.error,
            message=None if form is None or self.streaming else form.message(text),
            hidden_states=None if self.hidden is None else _stacked(self.hidden, len(ids)),
            pooled=None if self.pool is None else self.pool.mean(),
        )
        return output, text[self._told :]

    def _text(self, ids: list[int], finish: Finish) -> str:
        shown = ids
        if self._stopped_by_token(finish) and not self.params.include_stop_str_in_output:
            shown = ids[:-1]
        if self._stream is None:
            return decode_after(self._texts, self._prompt.ids, self._shown(shown), self._skips)
        rest = self._shown(shown[self.told_tokens :])
        self._pieces += (self._stream.push(rest), self._stream.finish())
        return "".join(self._pieces)

    def _stopped_by_token(self, finish: Finish) -> bool:
        if finish.reason != "stop" or isinstance(finish.stop_reason, str):
            return False
        if finish.stop_reason is not None or self._prompt.grammar is None:
            return True
        # a grammar that is complete ends with a token of the answer
        return bool(len(finish.tokens)) and int(finish.tokens[-1]) in self._prompt.eos_ids

    def _shown(self, ids: Sequence[int]) -> Sequence[int]:
        if not self._left_out:
            return ids
        return [token for token in ids if token not in self._left_out]

    def _cut(self, text: str, finish: Finish) -> str:
        stop = finish.stop_reason
        if not isinstance(stop, str):
            return text
        behind = b""
        if finish.stop_end_bytes:
            last = self._texts.token_bytes[int(finish.tokens[-1])]
            behind = last[-finish.stop_end_bytes :]
        end = len(text) - len(behind.decode("utf-8", "replace"))
        if not text.endswith(stop, 0, end):
            # the decoder wrote something else than the bytes, as some do at a text's start
            end = text.rfind(stop) + len(stop) if stop in text else len(text)
        cut = text[:end]
        return cut if self.params.include_stop_str_in_output else cut.removesuffix(stop)


def _stacked(rows: list[np.ndarray], count: int) -> np.ndarray:
    assert len(rows) == count, "a token without its hidden state"
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)


def _total(logprobs: list[Alternatives], ids: list[int]) -> float:
    pairs = zip(logprobs, ids, strict=False)  # an aborted request may have had its last cut off
    return sum(alternatives[token].logprob for alternatives, token in pairs)


def alternatives(
    values: LogprobRows, tokens: Sequence[int], widths: Sequence[int], texts: Texts
) -> Iterator[Alternatives]:
    """For each of the r rows: the token that was taken, then the `widths[i]` best, best first.

    `tokens` int[r] are the tokens taken.
    """
    chosen, ranks, width = values.chosen.tolist(), values.rank.tolist(), values.width
    top_ids, top = values.top_ids.tolist(), values.top.tolist()
    for row, token in enumerate(tokens):
        found = {token: Logprob(chosen[row], ranks[row], _shown(texts, token))}
        for place in range(min(width, widths[row])):
            other = top_ids[row * width + place]
            if other not in found:
                value = top[row * width + place]
                found[other] = Logprob(value, place + 1, _shown(texts, other))
        yield found


def _shown(texts: Texts, token: int) -> str:
    pieces = texts.token_bytes
    # a model's vocabulary may be padded beyond its tokenizer's
    return pieces[token].decode("utf-8", "replace") if token < len(pieces) else ""
