"""From logits to tokens.  What the rows ask for is staged once and reused while the rows stay.

Order: logit bias and the ban on stop ids below min_tokens, penalties, then temperature, min-p,
top-k, top-p, and the sample: the largest of logit / temperature + Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.noise import gumbel, row_keys, stream_key
from stepahead.types import SamplingParams

Upload = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class RowParams:
    """One row's wishes, as its join brought them."""

    slot: int
    params: SamplingParams
    seed: int
    choice: int
    prompt_len: int


@dataclass(frozen=True)
class Drawn:
    """The rows that draw: `rows_dev` int64[m], keys int64[m], float32[m, 1] columns; `filters`
    False when top-k, top-p and min-p are off for all of them."""

    rows_dev: Tensor
    keys_dev: Tensor
    floats_dev: Tensor  # float64[4, m] bit patterns as int64: temperature, top_p, min_p, top_k
    filters: bool


@dataclass(frozen=True)
class Edits:
    """Single logits that are changed: int64[k] rows and tokens, and what to do with them.

    `bias_dev` int64[3, b]: row, token, float64 bits.  `bans_dev` int64[3, b]: row, token, and the
    position from which on the token is allowed.
    """

    bias_dev: Tensor | None
    bans_dev: Tensor | None


@dataclass(frozen=True)
class Penalised:
    """`index_dev` int64[2, p]: row, row of counts.  `floats_dev` float64[3, p] bits: presence,
    frequency, repetition."""

    index_dev: Tensor
    floats_dev: Tensor


@dataclass(frozen=True)
class SampleGroup:
    """What the rows of a step ask of the sampler; None throughout for plain greedy rows."""

    drawn: Drawn | None
    edits: Edits | None
    penalised: Penalised | None
    logprob_rows: np.ndarray  # int32[l], and the same on the device
    logprob_rows_dev: Tensor | None
    logprob_width: int


def _bits(rows: list[list[float]]) -> np.ndarray:
    return np.array(rows, np.float64).view(np.int64)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float64).to(torch.float32)


def build_group(
    rows: list[RowParams], counts: PenaltyCounts, eos_ids: tuple[int, ...], upload: Upload
) -> SampleGroup:
    """Stages the wishes of the rows that will be sampled, in their order."""
    wants = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    width = max((rows[i].params.logprobs or 0 for i in wants), default=0)
    return SampleGroup(
        _drawn(rows, upload),
        _edits(rows, eos_ids, upload),
        _penalised(rows, counts, upload),
        np.array(wants, np.int32),
        upload(np.array(wants)) if wants else None,
        width,
    )


def _drawn(rows: list[RowParams], upload: Upload) -> Drawn | None:
    index = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not index:
        return None
    chosen = [rows[i].params for i in index]
    columns = [
        [p.temperature for p in chosen],
        [p.top_p for p in chosen],
        [p.min_p for p in chosen],
        [float(max(p.top_k, 0)) for p in chosen],
    ]
    keys = [stream_key(rows[i].seed, rows[i].choice) for i in index]
    filters = any(p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0 for p in chosen)
    both = upload(np.array([index, keys], np.int64))
    return Drawn(both[0], both[1], upload(_bits(columns)), filters)


def _edits(rows: list[RowParams], eos_ids: tuple[int, ...], upload: Upload) -> Edits | None:
    bias = [
        (i, token, value)
        for i, row in enumerate(rows)
        for token, value in (row.params.logit_bias or {}).items()
    ]
    bans = [
        (i, token, row.prompt_len + row.params.min_tokens)
        for i, row in enumerate(rows)
        if row.params.min_tokens
        for token in _stop_ids(row.params, eos_ids)
    ]
    if not bias and not bans:
        return None
    return Edits(_bias_table(bias, upload), upload(np.array(bans, np.int64).T) if bans else None)


def _stop_ids(params: SamplingParams, eos_ids: tuple[int, ...]) -> list[int]:
    ids = set(params.stop_token_ids or ())
    return sorted(ids if params.ignore_eos else ids | set(eos_ids))


def _bias_table(bias: list[tuple[int, int, float]], upload: Upload) -> Tensor | None:
    if not bias:
        return None
    rows, tokens, values = (list(column) for column in zip(*bias, strict=True))
    return upload(np.concatenate([np.array([rows, tokens], np.int64), _bits([values])]))


def _penalised(rows: list[RowParams], counts: PenaltyCounts, upload: Upload) -> Penalised | None:
    index = [i for i, row in enumerate(rows) if row.params.penalised]
    if not index:
        return None
    chosen = [rows[i] for i in index]
    columns = [
        [row.params.presence_penalty for row in chosen],
        [row.params.frequency_penalty for row in chosen],
        [row.params.repetition_penalty for row in chosen],
    ]
    table = np.array([index, [counts.row_of[row.slot] for row in chosen]], np.int64)
    return Penalised(upload(table), upload(_bits(columns)))


def sample(
    logits: Tensor, group: SampleGroup, positions_dev: Tensor, counts: PenaltyCounts
) -> Tensor:
    """Tokens int64[r] for float32[r, vocab] logits, which may be changed in place.

    `positions_dev` int64[r]: the position that each new token will have.
    """
    if group.edits is not None:
        _apply_edits(logits, group.edits, positions_dev)
    if group.penalised is not None:
        _apply_penalties(logits, group.penalised, counts)
    tokens = logits.argmax(-1)
    if group.drawn is not None:
        rows = group.drawn.rows_dev
        tokens[rows] = _draw(logits[rows], group.drawn, positions_dev[rows])
    if group.penalised is not None:
        row, count_row = group.penalised.index_dev
        counts.count(count_row, tokens[row])
    return tokens


def _apply_edits(logits: Tensor, edits: Edits, positions_dev: Tensor) -> None:
    if edits.bias_dev is not None:
        row, token, bits = edits.bias_dev
        logits.index_put_((row, token), _floats(bits), accumulate=True)
    if edits.bans_dev is not None:
        row, token, until = edits.bans_dev
        banned = positions_dev[row] < until
        now = logits[row, token]
        logits.index_put_((row, token), now.masked_fill(banned, -torch.inf))


def _apply_penalties(logits: Tensor, penalised: Penalised, counts: PenaltyCounts) -> None:
    row, count_row = penalised.index_dev
    presence, frequency, repetition = _floats(penalised.floats_dev).unsqueeze(-1)
    outputs = counts.outputs_dev[count_row]
    values = logits[row]
    seen = counts.prompt_dev[count_row] | (outputs > 0)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, repeated, values)
    values -= frequency * outputs + presence * (outputs > 0)
    logits[row] = values


def _draw(logits: Tensor, drawn: Drawn, positions_dev: Tensor) -> Tensor:
    temperature, top_p, min_p, top_k = _floats(drawn.floats_dev).unsqueeze(-1)
    logits = logits / temperature
    if drawn.filters:
        _filter(logits, top_p, min_p, top_k)
    noise = gumbel(row_keys(drawn.keys_dev, positions_dev), logits.shape[-1])
    return noise.add_(logits).argmax(-1)


def _filter(logits: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor) -> None:
    """Drops, in place, what min-p, then top-k, then top-p exclude; ties at an edge stay in."""
    ranked = logits.sort(-1, descending=True).values
    place = torch.arange(ranked.shape[-1], device=logits.device)
    keep = ranked >= ranked[:, :1] + min_p.log()
    keep &= (place < top_k) | (top_k == 0)
    share = ranked.masked_fill(~keep, -torch.inf).softmax(-1)
    keep &= share.cumsum(-1) - share < top_p  # the token that crosses top_p stays
    keep[:, 0] = True
    edge = ranked.gather(1, keep.sum(-1, keepdim=True) - 1)
    logits.masked_fill_(logits < edge, -torch.inf)
