"""When a row must stop: ids, strings, length.  One vectorised look-up flags the candidates;
only those are looked at in Python.  Knows token ids and their bytes, no text decoder."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepahead.types import SamplingParams


@dataclass(frozen=True, eq=False)
class StopRule:
    """What ends one request besides its length."""

    ids: frozenset[int]
    strings: tuple[bytes, ...]
    reported: frozenset[int]  # ids the client named: they are the `stop_reason`
    min_tokens: int
    skip_special: bool
    flagged: np.ndarray  # int64: tokens after which this rule must be looked at


class Vocabulary:
    """What each token id stands for in bytes, and which tokens can complete a given string."""

    def __init__(
        self, token_bytes: Sequence[bytes], special_ids: frozenset[int] = frozenset()
    ) -> None:
        self.token_bytes = token_bytes
        self.special_ids = special_ids
        self._sorted: list[bytes] = []
        self._order: list[int] = []
        self._ending: dict[bytes, np.ndarray] = {}

    def enders(self, text: bytes) -> np.ndarray:
        """Ids of the tokens within which an occurrence of `text` can end, int64, ascending."""
        if text not in self._ending:
            if len(self._ending) > 4096:  # a client may send a new string every time
                self._ending.clear()
            self._ending[text] = self._find(text)
        return self._ending[text]

    def _find(self, text: bytes) -> np.ndarray:
        if not self._order:
            self._order = sorted(range(len(self.token_bytes)), key=self.token_bytes.__getitem__)
            self._sorted = [self.token_bytes[token] for token in self._order]
        # an occurrence ends in a token that begins with the occurrence's tail ...
        found = {token for i in range(len(text)) for token in self._starting(text[i:])}
        # ... or has all of it inside
        found.update(t for t, piece in enumerate(self.token_bytes) if text in piece)
        return np.array(sorted(found), np.int64)

    def _starting(self, tail: bytes) -> list[int]:
        first = bisect_left(self._sorted, tail)
        last = first
        while last < len(self._sorted) and self._sorted[last].startswith(tail):
            last += 1
        return self._order[first:last]


class StopTable:
    """Counts, by token id, the live rules that want to look at that token."""

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...], vocabulary: Vocabulary) -> None:
        self._wanted = np.zeros(vocab_size, np.int32)
        self._eos = eos_ids
        self._vocabulary = vocabulary
        self._plain: dict[bool, StopRule] = {}
        self._users: dict[StopRule, int] = {}

    def rule(self, params: SamplingParams) -> StopRule:
        """The rule of a request, not yet counted."""
        if not params.stop and not params.stop_token_ids and not params.min_tokens:
            return self._shared(params)
        return self._build(params)

    def _shared(self, params: SamplingParams) -> StopRule:
        # most requests stop at the end-of-sequence ids alone: one rule object for all of them
        if params.ignore_eos not in self._plain:
            self._plain[params.ignore_eos] = self._build(params)
        return self._plain[params.ignore_eos]

    def _build(self, params: SamplingParams) -> StopRule:
        named = frozenset(params.stop_token_ids or ())
        ids = named if params.ignore_eos else named | frozenset(self._eos)
        strings = tuple(text.encode() for text in params.stops)
        groups = [np.array(sorted(ids), np.int64), *map(self._vocabulary.enders, strings)]
        flagged = np.unique(np.concatenate(groups))
        return StopRule(ids, strings, named, params.min_tokens, params.skip_special_tokens, flagged)

    def add(self, rule: StopRule) -> None:
        """Counts a user of the rule in."""
        users = self._users.get(rule, 0)
        if not users:
            self._wanted[rule.flagged] += 1
        self._users[rule] = users + 1

    def remove(self, rule: StopRule) -> None:
        """Counts a user of the rule out."""
        self._users[rule] -= 1
        if not self._users[rule]:
            del self._users[rule]
            self._wanted[rule.flagged] -= 1

    @property
    def counted(self) -> bool:
        """Whether any rule is counted in."""
        return bool(self._users) or bool(self._wanted.any())

    def candidates(self, tokens: np.ndarray) -> np.ndarray:
        """Indices into `tokens` (int32[n]) after which some live rule must be looked at."""
        return self._wanted[tokens].nonzero()[0]

    def matched(self, rule: StopRule, outputs: np.ndarray) -> tuple[int | str, int] | None:
        """Whether the last of `outputs` int32[n] ends the request: (what matched, bytes behind it).

        Stop strings win over ids.  Nothing ends a request before `min_tokens` are out.
        """
        if len(outputs) <= rule.min_tokens:
            return None
        if rule.strings and (hit := self._string(rule, outputs)):
            return hit
        token = int(outputs[-1])
        return (token, 0) if token in rule.ids else None

    def _string(self, rule: StopRule, outputs: np.ndarray) -> tuple[str, int] | None:
        last = self._bytes(rule, int(outputs[-1]))
        if not last:
            return None
        most = max(map(len, rule.strings)) - 1
        tail = self._tail(rule, outputs[:-1], most)
        best: tuple[int, bytes] | None = None
        for text in rule.strings:
            at = (tail + last).find(text, max(0, len(tail) - len(text) + 1))
            if at >= 0 and (best is None or at + len(text) < best[0]):
                best = (at + len(text), text)
        if best is None:
            return None
        return best[1].decode(), len(tail) + len(last) - best[0]

    def _tail(self, rule: StopRule, outputs: np.ndarray, most: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        for token in outputs[::-1]:
            if size >= most:
                break
            pieces.append(self._bytes(rule, int(token)))
            size += len(pieces[-1])
        return b"".join(reversed(pieces))

    def _bytes(self, rule: StopRule, token: int) -> bytes:
        if rule.skip_special and token in self._vocabulary.special_ids:
            return b""
        pieces = self._vocabulary.token_bytes
        return pieces[token] if token < len(pieces) else b""
