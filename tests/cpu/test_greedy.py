"""Greedy rows on the CPU: the kernel against its twin in torch, and whole engines that use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines import Variant
from harness import differences, exactly, play
from stepahead.runner import greedy
from structured import structured

# ties, both zeros and both signs of NaN are common
BITS = np.array(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0xFF800001, 0x80000000, 0, 1, 0x80000001],
    np.uint32,
)
VALUES = np.concatenate([BITS.view(np.float32), np.float32([1.5, 1.5, -1.5, 3e38, -3e38, 7.0])])
WORDS = np.array([0, -1, 1, -(2**31), 0x0F0F0F0F], np.int32)


def twin(logits: Tensor, rows: Tensor | None, masks: Tensor | None) -> Tensor:
    """int64[m] by torch, a bit at a time."""
    picked = logits.clone() if rows is None else logits[rows]
    if masks is not None:
        bits = (masks.unsqueeze(-1) >> torch.arange(32) & 1).flatten(1)[:, : logits.shape[1]]
        picked.masked_fill_(bits == 0, -torch.inf)
    return picked.argmax(-1)


def case(
    seed: int, vocab: int, plain: float, masked: bool, picked: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logits, a share `plain` of them ordinary ones; rows; masks."""
    rnd = np.random.default_rng(seed)
    count, most = int(rnd.integers(1, 5)), int(rnd.integers(1, len(VALUES) + 1))
    odd = rnd.choice(rnd.permutation(VALUES)[:most], (count, vocab + 3))
    normal = rnd.standard_normal((count, vocab + 3)).astype(np.float32)
    logits = np.where(rnd.random((count, vocab + 3)) < plain, normal, odd)
    rows = rnd.permutation(count)[: rnd.integers(1, count + 1)] if picked else None
    masks = None
    if masked:
        shape = (count if rows is None else len(rows), -(-vocab // 32) + int(rnd.integers(0, 2)))
        any_word = rnd.integers(-(2**31), 2**31, shape).astype(np.int32)
        masks = np.where(rnd.random(shape) < 0.5, rnd.choice(WORDS, shape), any_word)
    # rows lie further apart than they are long, and don't begin at a whole vector
    return (
        torch.from_numpy(logits)[:, 3:],
        None if rows is None else torch.from_numpy(rows),
        None if masks is None else torch.from_numpy(masks),
    )


@pytest.fixture(scope="module")
def kernel() -> greedy.Choose:
    return greedy.build_choose(torch.device("cpu"), 1 << 20)


@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 700),
    plain=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    masked=st.booleans(),
    picked=st.booleans(),
)
def test_the_kernel_chooses_what_torch_does(
    kernel: greedy.Choose, seed: int, vocab: int, plain: float, masked: bool, picked: bool
) -> None:
    """Whatever the logits, NaN and infinities included; in ties the first, under masks too."""
    logits, rows, masks = case(seed, vocab, plain, masked, picked)
    wanted, before = twin(logits, rows, masks), logits.clone()
    assert kernel(logits, rows, masks).tolist() == wanted.tolist()
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def test_every_bit_of_every_word_of_a_mask_counts(kernel: greedy.Choose) -> None:
    """One token allowed, wherever it lies; the others' logits are larger."""
    vocab = 32 * 9 + 5
    logits = torch.ones(vocab, vocab)
    logits[torch.arange(vocab), torch.arange(vocab)] = -5.0
    bits = np.zeros((vocab, 320), np.uint8)
    bits[np.arange(vocab), np.arange(vocab)] = 1
    masks = torch.from_numpy(np.packbits(bits, 1, "little").view(np.int32))
    assert kernel(logits, None, masks).tolist() == list(range(vocab))


@given(seed=st.integers(0, 2**32), vocab=st.integers(1, 100), picked=st.booleans())
def test_without_the_kernel_the_choice_is_the_same(seed: int, vocab: int, picked: bool) -> None:
    """NaN that is allowed is larger than +inf there, too.  Signaling ones, which no arithmetic
    makes, are left out: np.fmin does not know that a bound is smaller."""
    choose = greedy.build_choose(torch.device("cpu"), 100)
    for masked in (False, True):
        logits, rows, masks = case(seed, vocab, 0.5, masked, picked)
        logits = logits.where(~logits.isnan(), torch.nan)
        wanted = twin(logits, rows, masks)
        assert choose(logits, rows, masks).tolist() == wanted.tolist()


def test_masks_that_are_too_short_are_refused(kernel: greedy.Choose) -> None:
    with pytest.raises(ValueError, match="masks of 1 words for 33 logits"):
        kernel(torch.zeros(1, 33), None, torch.zeros(1, 1, dtype=torch.int32))


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows)


def masks_of(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full((count, 2), -1, dtype=dtype)


REFUSED: dict[str, tuple[Tensor | None, Tensor | None, str]] = {
    "a row behind the last": (ids(0, 3), None, "rows 0 to 3 of 3"),
    "a row before the first": (ids(2, -1), None, "rows -1 to 2 of 3"),
    "rows of 32 bits": (ids(0, 1).int(), None, r"int64\[m\], not torch.int32\[2\]"),
    "rows of rows": (ids(0, 1)[:, None], None, r"int64\[m\], not torch.int64\[2, 1\]"),
    "a mask too few": (None, masks_of(2), "2 masks of torch.int32 for 3 rows"),
    "fewer masks than picked rows": (ids(1, 2), masks_of(1), "1 masks of torch.int32 for 2 rows"),
    "masks of 64 bits": (None, masks_of(3, torch.int64), "3 masks of torch.int64 for 3 rows"),
}


@pytest.mark.parametrize(("rows", "masks", "words"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_read_from_elsewhere_in_memory_is_refused(
    kernel: greedy.Choose, rows: Tensor | None, masks: Tensor | None, words: str
) -> None:
    """The kernel is given addresses, and looks at no bounds."""
    with pytest.raises(ValueError, match=words):
        kernel(torch.zeros(3, 64), rows, masks)


def test_no_rows_are_no_error(kernel: greedy.Choose) -> None:
    assert kernel(torch.zeros(3, 64), ids().long(), masks_of(0)).tolist() == []


@pytest.mark.parametrize("masks", [masks_of(2), masks_of(3, torch.int64)])
def test_masks_that_do_not_fit_are_refused_without_the_kernel_too(masks: Tensor) -> None:
    """Read as bytes, masks of 64 bits would forbid other tokens than they say."""
    with pytest.raises(ValueError, match=r"masks of torch.int.. for 3 rows"):
        greedy.choose(torch.zeros(3, 64), None, masks)


def test_engines_choose_with_the_kernel_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with grammars, without, and that draw, in every loop."""
    asked: list[tuple[bool, bool]] = []
    build = greedy.build_choose

    def watched(place: torch.device, vocab_size: int) -> greedy.Choose:
        choose = build(place, 1 << 20)

        def watch(*args: Any) -> Tensor:
            asked.append((args[1] is not None, len(args) > 2 and args[2] is not None))
            return choose(*args)

        return watch

    for seed, loop, device in (
        (1, "serial", "cpu"),
        (2, "overlap", "cpu"),
        (3, "overlap", "hostile"),
        (6, "batch-queue", "hostile"),
        (7, "serial", "hostile"),
    ):
        work = structured(seed)
        right = play(work)
        with monkeypatch.context() as patched:
            patched.setattr("stepahead.runner.sampling.build_choose", watched)
            depth = 3 if loop == "batch-queue" else 0
            run = play(work, Variant(loop, device, seed, depth))
        assert not differences(right, run, exactly), (seed, loop, device)
    # of some rows and of all, with masks and without
    assert {*asked} == {(False, False), (False, True), (True, False), (True, True)}


def test_rows_and_masks_may_lie_apart_in_memory(kernel: greedy.Choose) -> None:
    """The kernel is given addresses, and reads on from there."""
    logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([4, 0, 1, 0, 5, 0])[::2]
    wide = torch.full((3, 4), -1, dtype=torch.int32)
    wide[:, 1::2] = 0  # what would be read by mistake
    masks = wide[:, ::2]
    wanted = logits[rows].argmax(1).tolist()
    assert kernel(logits, rows).tolist() == wanted
    assert kernel(logits, rows, masks).tolist() == wanted
