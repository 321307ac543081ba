"""What the CPU's kernels compute."""

from __future__ import annotations

from mutating import Mutation

_GREEDY = "tests/cpu/test_greedy.py::"
_TWIN = _GREEDY + "test_the_kernel_chooses_what_torch_does"

MUTATIONS = [
    Mutation(
        "the kernel takes the last of equal logits",
        "a greedy answer that is another one than torch's",
        "kernels/choose.py",
        "        if top > best:\n"
        "            best, chosen = top, first + _place(at, count, top, _ANY)\n",
        "        if top >= best:\n"
        "            best, chosen = top, first + _place(at, count, top, _ANY)\n",
        _TWIN,
    ),
    Mutation(
        "the kernel reads a word of a mask back to front",
        "a token that the grammar forbids",
        "kernels/choose.py",
        "_TO_SIGN = _BITS[::-1].copy()",
        "_TO_SIGN = _BITS.copy()",
        _GREEDY + "test_every_bit_of_every_word_of_a_mask_counts",
    ),
    Mutation(
        "the kernel ignores a mask in its last word",
        "a token from the vocabulary's padding",
        "kernels/choose.py",
        "        if word == 0:\n            continue\n",
        "        if place == len(words) - 1:\n            word = _ANY\n",
        _TWIN,
    ),
    Mutation(
        "the kernel looks for numbers alone",
        "NaN that nobody notices",
        "kernels/choose.py",
        "(rank == top or (rank > _HIGHEST and top > _HIGHEST))",
        "rank == top",
        _TWIN,
    ),
    Mutation(
        "the kernel takes a part's rows for the first ones",
        "a row's token sampled from another row's logits",
        "kernels/choose.py",
        "int64s(rows, count)[place] if rows else place",
        "place",
        _TWIN,
    ),
]
