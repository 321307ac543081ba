"""From logits to tokens.  What the rows ask for is staged once and reused while the rows stay.

Order: logit bias and the ban on stop ids below min_tokens, other bans and the user's processor
(`hooks.py`), penalties, then temperature, min-p, top-k, top-p, and the sample: the largest of logit
/ temperature + Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.ends import Ends
from stepahead.runner.greedy import best
from stepahead.runner.hooks import Hooks, RowError
from stepahead.runner.noise import gumbel, row_keys


@dataclass(frozen=True)
class Drawn:
    """The rows that draw: `rows_dev` int64[m], the keys of their noise `keys_dev` int64[m], and
    `floats_dev` int64[4, m], the bits of float64 temperature, top_p, min_p and top_k (0 is off).
    `filters` is False when top-k, top-p and min-p are off for all of them."""

    rows_dev: Tensor
    keys_dev: Tensor
    floats_dev: Tensor
    filters: bool


@dataclass(frozen=True)
class Edits:
    """Single logits that are changed.

    `bias_dev` int64[3, b]: row, token, float64 bits of what is added.  `bans_dev` int64[3, b]: row,
    token, and the position from which on the token is allowed.
    """

    bias_dev: Tensor | None
    bans_dev: Tensor | None


@dataclass(frozen=True)
class Penalised:
    """The rows with penalties: `rows_dev` int64[p], their rows of counts `counts_dev` int64[p], and
    `floats_dev` int64[3, p], the bits of float64 presence, frequency and repetition."""

    rows_dev: Tensor
    counts_dev: Tensor
    floats_dev: Tensor


@dataclass(frozen=True)
class SampleGroup:
    """What the rows of a step ask of the sampler; None throughout for plain greedy rows.

    `logprob_rows` int32[l] are the rows that want log-probabilities, `logprob_rows_dev` the same
    on the device, and `logprob_width` the most alternatives that one of them wants.  `hidden_rows`
    and `hidden_rows_dev` are those that want their hidden state.  `ends` is None where no token
    that the device knows of ends a row.  `hooks`: what else is done to their logits.
    """

    drawn: Drawn | None
    edits: Edits | None
    penalised: Penalised | None
    logprob_rows: np.ndarray
    logprob_rows_dev: Tensor | None
    logprob_width: int
    hidden_rows: np.ndarray
    hidden_rows_dev: Tensor | None
    ends: Ends | None
    hooks: Hooks | None = None

    @property
    def looks_back(self) -> bool:
        """Whether the tokens before a sampled one matter, drafts too."""
        return self.penalised is not None or (
            self.hooks is not None and self.hooks.kept is not None
        )

    @property
    def plain(self) -> bool:
        """Whether a token is the largest logit, as it stands."""
        asked = (self.drawn, self.edits, self.penalised, self.hooks)
        return all(wish is None for wish in asked)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float64).to(torch.float32)


def sample(
    logits: Tensor,
    group: SampleGroup,
    positions_dev: Tensor,
    counts: PenaltyCounts,
    before_dev: Tensor | None = None,
    failed: list[RowError] | None = None,
    known: Sequence[np.ndarray] = (),
) -> Tensor:
    """Tokens int64[r] for float32[r, vocab] logits, which may be changed in place.

    `positions_dev` int64[r]: the position that each new token will have.  `before_dev` int64[r, k]:
    drafts that stand between a row's counted tokens and the new one, negative where there is none;
    with them nothing is counted, for not all of these tokens will be output.  `failed` is given the
    rows whose processor has raised: their tokens are void.  `known`: as in `Hooks.edit`.
    """
    if group.edits is not None:
        _apply_edits(logits, group.edits, positions_dev)
    if group.hooks is not None:
        errors = group.hooks.edit(logits, positions_dev, before_dev, known)
        if failed is not None:
            failed += errors
    if group.penalised is not None:
        _apply_penalties(logits, group.penalised, counts, before_dev)
    tokens = best(logits)
    if group.drawn is not None:
        rows = group.drawn.rows_dev
        tokens[rows] = _draw(logits[rows], group.drawn, positions_dev[rows])
    if group.penalised is not None and before_dev is None:
        counts.count(group.penalised.counts_dev, tokens[group.penalised.rows_dev])
    if group.hooks is not None:
        group.hooks.keep(positions_dev, tokens)
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


def _apply_penalties(
    logits: Tensor, penalised: Penalised, counts: PenaltyCounts, before_dev: Tensor | None
) -> None:
    rows, count_rows = penalised.rows_dev, penalised.counts_dev
    presence, frequency, repetition = _floats(penalised.floats_dev).unsqueeze(-1)
    outputs = counts.outputs_dev[count_rows]
    if before_dev is not None:
        drafts = before_dev[rows]
        outputs.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).to(outputs.dtype))
    values = logits[rows]
    seen = counts.prompt_dev[count_rows] | (outputs > 0)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, repeated, values)
    values -= frequency * outputs + presence * (outputs > 0)
    logits[rows] = values


def _draw(logits: Tensor, drawn: Drawn, positions_dev: Tensor) -> Tensor:
    temperature, top_p, min_p, top_k = _floats(drawn.floats_dev).unsqueeze(-1)
    logits = logits / temperature
    if drawn.filters:
        _filter(logits, top_p, min_p, top_k)
    noise = gumbel(row_keys(drawn.keys_dev, positions_dev), logits.shape[-1])
    return best(noise.add_(logits))


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
