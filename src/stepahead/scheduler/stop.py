"""When a row must stop: ids, strings, length.  One vectorised look-up flags the candidates;
only those are looked at in Python.  Knows token ids and their bytes, no text decoder."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
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
        order = sorted(range(len(token_bytes)), key=token_bytes.__getitem__)
        self._order = np.array(order, np.int64)
        self._sorted = [token_bytes[token] for token in order]
        self._bytes = np.frombuffer(b"".join(token_bytes), np.uint8)  # all pieces, end to end
        self._ends = np.cumsum([len(piece) for piece in token_bytes])
        self._longest = max(map(len, token_bytes), default=0)
        self._ending: dict[bytes, np.ndarray] = {}
        self._remembered = 0  # ids in all of them

    def enders(self, text: bytes) -> np.ndarray:
        """Ids of the tokens within which an occurrence of `text` can end, int64, ascending."""
        if text not in self._ending:
            if self._remembered > _MOST_REMEMBERED:  # a client may send a new string every time
                self._ending.clear()
                self._remembered = 0
            # an occurrence ends in a token that begins with its tail, or has all of it inside
            tails = [self._starting(text[i:]) for i in range(len(text))]
            self._ending[text] = np.unique(np.concatenate([*tails, self._holding(text)]))
            self._remembered += len(self._ending[text]) + len(text)
        return self._ending[text]

    def _starting(self, tail: bytes) -> np.ndarray:
        first = bisect_left(self._sorted, tail)
        # what begins with the tail lies together, before the next string of its length
        last = bisect_left(self._sorted, True, first, key=lambda piece: not piece.startswith(tail))
        return self._order[first:last]

    def _holding(self, text: bytes) -> np.ndarray:
        places = len(self._bytes) - len(text) + 1
        if len(text) > self._longest or places < 1:
            return self._order[:0]
        there = np.ones(places, np.bool_)
        for i, byte in enumerate(text):
            there &= self._bytes[i : i + places] == byte
        at = there.nonzero()[0]
        token = np.searchsorted(self._ends, at, "right")
        return token[at + len(text) <= self._ends[token]]  # others stand across two pieces


_MOST_REMEMBERED = 4_000_000

# what a row watches for, and why a token is worth a look
WATCH_EOS = 1  # the plain rule: the end of sequence, and nothing else
WATCH_OWN = 2  # a rule of its own
_STOPPING, _IGNORING = SamplingParams(), SamplingParams(ignore_eos=True)


class StopTable:
    """What kinds of rule want to look at each token: a bit for the ends of sequence, and a bit for
    the own rules of live requests, which are counted."""

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...], vocabulary: Vocabulary) -> None:
        self._own = np.zeros(vocab_size, np.int32)
        self._kinds = np.zeros(vocab_size, np.uint8)
        self._kinds[list(eos_ids)] = WATCH_EOS
        self._eos = eos_ids
        self._vocabulary = vocabulary
        self._users = 0
        self._plain = {True: self._build(_IGNORING), False: self._build(_STOPPING)}

    def rule(self, params: SamplingParams) -> StopRule:
        """The rule of a request, not yet counted; most requests share a plain one."""
        if not params.stop and not params.stop_token_ids and not params.min_tokens:
            return self._plain[params.ignore_eos]
        return self._build(params)

    def _build(self, params: SamplingParams) -> StopRule:
        named = frozenset(params.stop_token_ids or ())
        ids = named if params.ignore_eos else named | frozenset(self._eos)
        strings = tuple(text.encode() for text in params.stops)
        groups = [np.array(sorted(ids), np.int64), *map(self._vocabulary.enders, strings)]
        flagged = np.unique(np.concatenate(groups))
        return StopRule(ids, strings, named, params.min_tokens, params.skip_special_tokens, flagged)

    def add(self, rule: StopRule) -> int:
        """Counts a user of the rule in; what its row watches for."""
        self._users += 1
        if rule is self._plain[True]:
            return 0
        if rule is self._plain[False]:
            return WATCH_EOS
        self._own[rule.flagged] += 1
        self._kinds[rule.flagged] |= WATCH_OWN
        return WATCH_OWN

    def remove(self, rule: StopRule) -> None:
        """Counts a user of the rule out."""
        self._users -= 1
        if rule in (self._plain[True], self._plain[False]):
            return
        self._own[rule.flagged] -= 1
        unwanted = rule.flagged[self._own[rule.flagged] == 0]
        self._kinds[unwanted] &= WATCH_EOS

    @property
    def counted(self) -> bool:
        """Whether any rule is counted in."""
        return bool(self._users) or bool(self._own.any())

    def candidates(self, tokens: np.ndarray, watch: np.ndarray) -> np.ndarray:
        """Indices of rows to be looked at after `tokens` int32[n]; `watch` uint8[n] is theirs."""
        return (self._kinds[tokens] & watch).nonzero()[0]

    def matched(
        self, rule: StopRule, count: int, last: Callable[[int], np.ndarray]
    ) -> tuple[int | str, int] | None:
        """Whether the newest of `count` outputs ends the request: (what matched, bytes behind it).

        `last(k)` gives the last k outputs, int32[k].  Stop strings win over ids.  Nothing ends a
        request before `min_tokens` are out.
        """
        if count <= rule.min_tokens:
            return None
        token = int(last(1)[0])
        if rule.strings and (hit := self._string(rule, token, count, last)):
            return hit
        return (token, 0) if token in rule.ids else None

    def _string(
        self, rule: StopRule, token: int, count: int, last: Callable[[int], np.ndarray]
    ) -> tuple[str, int] | None:
        newest = self._bytes(rule, token)
        if not newest:
            return None
        tail = self._tail(rule, count, last)
        best: tuple[int, bytes] | None = None
        for text in rule.strings:
            at = (tail + newest).find(text, max(0, len(tail) - len(text) + 1))
            if at >= 0 and (best is None or at + len(text) < best[0]):
                best = (at + len(text), text)
        if best is None:
            return None
        return best[1].decode(), len(tail) + len(newest) - best[0]

    def _tail(self, rule: StopRule, count: int, last: Callable[[int], np.ndarray]) -> bytes:
        """The bytes before the newest token, as many as a string could need, or all there are."""
        most = max(map(len, rule.strings)) - 1
        wanted = most  # nearly every token has a byte or more
        while True:
            wanted = min(wanted, count - 1)
            tail = b"".join(self._bytes(rule, int(t)) for t in last(wanted + 1)[:-1])
            if len(tail) >= most or wanted == count - 1:
                return tail
            wanted *= 2

    def _bytes(self, rule: StopRule, token: int) -> bytes:
        if rule.skip_special and token in self._vocabulary.special_ids:
            return b""
        pieces = self._vocabulary.token_bytes
        return pieces[token] if token < len(pieces) else b""
