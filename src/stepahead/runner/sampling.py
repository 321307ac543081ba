"""What a forward does behind the model: logits, samples, and what the next step finds of them.

Rows that wait for masks are sampled later than the others, in the same forward: the first part is
sampled and told, the late one when its masks have arrived.  What all rows leave for the next step
they leave together, behind the last part, for the next forward has all of them.

All of it runs on the forward stream.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stepahead.plan import RowFailure
from stepahead.runner.counts import PenaltyCounts
from stepahead.runner.decode import DecodeKernels
from stepahead.runner.ends import ended
from stepahead.runner.flight import Look, PartBox, StepBox, made
from stepahead.runner.grammar import apply_masks
from stepahead.runner.greedy import build_choose
from stepahead.runner.hand_over import HandOver
from stepahead.runner.hidden import state_sums
from stepahead.runner.hooks import RowError
from stepahead.runner.inference import inference
from stepahead.runner.inputs import advance, advance_chunks
from stepahead.runner.logprobs import describe, describe_hidden
from stepahead.runner.relay import Relay
from stepahead.runner.sampler import sample
from stepahead.runner.slots import SlotState
from stepahead.runner.stage import SampledPart, Staged
from stepahead.runner.verify import Answers, Asked, Verifier, cut


class Sampling:
    """Samples the rows of steps.  `logits_of` is the model's, from [r, hidden]."""

    def __init__(
        self,
        logits_of: Callable[[Tensor], Tensor],
        slots: SlotState,
        relay: Relay,
        counts: PenaltyCounts,
        verifier: Verifier | None,
        hand_over: HandOver | None,
        decode: DecodeKernels | None,
        follows_lengths: bool,
    ) -> None:
        """`follows_lengths`: the host wants the slots' lengths behind each step."""
        self._logits_of = logits_of
        self._choose = build_choose(slots.length_dev.device, counts.vocab_size)
        self._slots = slots
        self._relay = relay
        self._counts = counts
        self._verifier = verifier
        self._hand_over = hand_over
        self._decode = decode
        self._follows_lengths = follows_lengths

    def first(self, staged: Staged, box: StepBox, logits_dev: Tensor | None = None) -> None:
        """All rows but the late ones.  `logits_dev` float32[r, vocab] where they have been
        computed; changed in place."""
        with inference():
            states = made(box.states_dev)
            if staged.late is None and self._ends_at_once(staged.first, box):
                logits = self._logits_of(states)
                box.first.tokens_dev = self._end(staged, box, staged.first, logits)
                return
            if self._verifier is not None:
                advance_chunks(staged.inputs, self._slots)
            elif box.ends_dev is None:
                advance(staged.inputs, self._slots)
            for score in staged.scores:
                rows = states[score.first : score.first + score.count]
                targets = score.targets_dev
                box.prompts.append(describe_hidden(self._logits_of, rows, targets, score.width))
            if staged.pools:
                box.sums_dev = state_sums(states, staged.pools)
            look = self._look(staged, box, states, logits_dev)
            if look is not None:
                self._sample(staged.first, box.first, look, box.asked)
            if staged.late is None:
                box.first.tokens_dev = self._leave(staged, box, look)
                return
            assert look is not None, "a row waits for its mask, and nobody is sampled"
            box.look = look
            if self._verifier is not None:
                _, tokens = self._verifier.runs(made(box.asked), _answers(look, states))
                box.first.tokens_dev = staged.first.pick(tokens)

    def late(
        self,
        staged: Staged,
        box: StepBox,
        masks_dev: Tensor,
        legal_dev: Tensor | None,
        known: Sequence[np.ndarray] = (),
    ) -> None:
        """The rows that have waited, with the masks int64[m, ..] of their positions, two words in
        each.  Under drafts `legal_dev` int64[2, n]: of late decode rows, how many drafts their
        grammars allow.  `known` as in `Masks`."""
        late = staged.late
        assert late is not None
        with inference():
            look = made(box.look)
            if legal_dev is not None:
                box.asked = cut(made(box.asked), *legal_dev)
            masks = masks_dev.view(torch.int32)
            if self._ends_at_once(late.part, box):
                tokens = self._end(staged, box, late.part, look.logits_dev, masks)
                box.late.tokens_dev, box.look = tokens, None
                return
            self._sample(late.part, box.late, look, box.asked, masks, known)
            tokens = self._leave(staged, box, look)
            box.late.tokens_dev = late.part.pick(tokens)
            # or the logits of every step that is kept would be
            box.look = None

    def _ends_at_once(self, part: SampledPart, box: StepBox) -> bool:
        """Whether a kernel samples the part, which is all of the step, and leaves its tokens."""
        return box.ends_dev is not None and part.takes_largest

    def _end(
        self,
        staged: Staged,
        box: StepBox,
        part: SampledPart,
        logits: Tensor,
        masks_dev: Tensor | None = None,
    ) -> Tensor:
        """As `_look`, `_sample` and `_leave`; the tokens int64[r]."""
        slots_dev, ends = staged.inputs.slots_dev, part.group.ends
        tokens = made(self._decode).end(slots_dev, logits, masks_dev, ends)
        box.states_dev = None
        self._follow_lengths(box)
        return tokens

    def _look(
        self, staged: Staged, box: StepBox, states: Tensor, logits: Tensor | None
    ) -> Look | None:
        """None where nobody is sampled."""
        step, verifier = staged.inputs, self._verifier
        slots_dev = step.slots_dev
        if not len(slots_dev):
            return None
        if step.sampled_dev is not None:
            states = states[step.sampled_dev]
        logits = self._logits(states, box.asked) if logits is None else logits
        if box.ends_dev is not None:
            positions = box.ends_dev
        elif verifier is None:
            positions = self._slots.length_dev.index_select(0, slots_dev)
        else:
            positions = verifier.positions(step, made(box.asked))
        # filled part by part, or replaced as a whole
        tokens = positions if staged.late is None else torch.zeros_like(positions)
        return Look(states, logits, positions, tokens)

    def _logits(self, states: Tensor, asked: Asked | None) -> Tensor:
        """float32[r, vocab] for states [r, hidden]; zeros of those that were not computed."""
        verifier = self._verifier
        if verifier is None or asked is None:
            return self._logits_of(states)
        computed = self._logits_of(verifier.computed(asked, states))
        return verifier.spread(asked, computed)

    def _sample(
        self,
        part: SampledPart,
        out: PartBox,
        look: Look,
        asked: Asked | None,
        masks_dev: Tensor | None = None,
        known: Sequence[np.ndarray] = (),
    ) -> None:
        if part.empty:
            out.tokens_dev = look.tokens_dev[:0]
            return
        group = part.group
        if group.hidden_rows_dev is not None:
            out.hidden_dev = part.pick(look.states_dev)[group.hidden_rows_dev].float()
        positions = part.pick(look.positions_dev)
        if group.plain and group.logprob_rows_dev is None:
            tokens = self._choose(look.logits_dev, part.at_dev, masks_dev)
        else:
            tokens = self._draw(part, out, look, positions, asked, masks_dev, known)
        over = None if group.ends is None else ended(group.ends, tokens, positions)
        look.take(part, tokens, over)
        if self._verifier is None:
            out.tokens_dev = tokens

    def _draw(
        self,
        part: SampledPart,
        out: PartBox,
        look: Look,
        positions: Tensor,
        asked: Asked | None,
        masks_dev: Tensor | None,
        known: Sequence[np.ndarray],
    ) -> Tensor:
        group, logits = part.group, part.pick(look.logits_dev)
        wanted = group.logprob_rows_dev
        # a copy: sampling changes logits in place
        raw = None if wanted is None else logits[wanted]
        before = None
        if self._verifier is not None and group.looks_back:
            before = part.pick(self._verifier.before(made(asked), len(look.positions_dev)))
        if masks_dev is not None:
            apply_masks(logits, masks_dev)
        failed: list[RowError] = []
        tokens = sample(logits, group, positions, self._counts, before, failed, known)
        if failed:
            out.failed += _failures(failed, part, asked)
        if wanted is not None and raw is not None:
            out.logprobs = describe(raw, tokens[wanted], group.logprob_width)
        return tokens

    def _leave(self, staged: Staged, box: StepBox, look: Look | None) -> Tensor:
        """What the next step finds; the result's tokens int64[r] of all rows."""
        step, states = staged.inputs, made(box.states_dev)
        box.states_dev = None
        if look is None:
            if self._verifier is not None:
                self._verifier.nothing(step, states)
            tokens = step.slots_dev
        elif self._verifier is not None:
            tokens = self._take_runs(self._verifier, staged, box, _answers(look, states))
        else:
            tokens = look.tokens_dev
            self._stash(staged, tokens, look.over_dev)
        self._follow_lengths(box)
        return tokens

    def _follow_lengths(self, box: StepBox) -> None:
        if self._follows_lengths:
            # a copy: the next step may change them while the copy stream still reads
            box.lengths_dev = self._slots.length_dev.clone()

    def _stash(self, staged: Staged, tokens: Tensor, over: Tensor | None) -> None:
        slots_dev = staged.inputs.slots_dev
        self._relay.stash(slots_dev, tokens)
        if self._hand_over is not None:
            self._hand_over.give_back(staged.step, tokens)
        if over is not None:
            self._slots.bury(slots_dev, over)

    def _take_runs(
        self, verifier: Verifier, staged: Staged, box: StepBox, answers: Answers
    ) -> Tensor:
        tokens, drafts = verifier.take(staged.inputs, made(box.asked), answers)
        late = None if staged.late is None else staged.late.part
        for part in (staged.first, late):
            penalised = None if part is None else part.group.penalised
            if part is not None and penalised is not None:
                rows, owners = penalised.rows_dev, penalised.counts_dev
                sampled, counted = part.pick(answers.tokens_dev)[rows], part.pick(tokens)[rows] >= 0
                self._counts.count_where(owners, sampled, counted)
        box.drafts_dev = drafts
        box.asked = None
        return tokens


def _failures(failed: list[RowError], part: SampledPart, asked: Asked | None) -> list[RowFailure]:
    """The same by rows of the step, each once."""
    at = part.places(np.array([error.row for error in failed], np.int32))
    if asked is not None:
        n, width = asked.tokens_dev.shape
        at = np.where(at < n * width, at // width, at - n * width + n)
    words = dict(zip(at.tolist(), (error.words for error in failed), strict=True))
    return [RowFailure(row, error) for row, error in words.items()]


def _answers(look: Look, states_dev: Tensor) -> Answers:
    return Answers(look.tokens_dev, look.positions_dev, states_dev, look.over_dev)
