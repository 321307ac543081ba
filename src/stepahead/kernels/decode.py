"""What stands around the model in a step that only decodes: its inputs, and its greedy end.

Both are told all they need in int64s of the names below: counts, strides, and addresses of int64s
that lie one behind the other.  `slots` have each a row of `pages`, a length (positions computed), a
seat (the slot whose pages and length count: its own, or 0 when it is dead) and, where `tokens` is
not 0, the token that waits for its next step.
"""

from __future__ import annotations

import numpy as np

from stepahead.kernels.choose import chosen_of
from stepahead.kernels.jit import entry, inner
from stepahead.kernels.memory import bytes_at, int64s

# both
COUNT, ROWS, SEATS, TOKENS = 0, 1, 2, 3  # the step's rows, and their slots
ENDS = 4  # of each row: positions computed after this step, the place of its new token
# inputs
LENGTHS, PAGES, COLUMNS, PAGE_SIZE = 5, 6, 7, 8  # by slot; pages of a slot
IDS, POSITIONS, CELLS, LENS, TABLES, WIDTH = 9, 10, 11, 12, 13, 14  # by row; pages of a row
# end
LOGITS, STRIDE, VOCAB = 5, 6, 7  # float32, a row every `stride` values
MASKS, WORDS = 8, 9  # int32[count, words], or 0
EOS, HEED = 10, 11  # bool[vocab], and whether a row heeds it: 0 for none, and for all
OWN, OWNS = 12, 13  # int64[3, owns]: row, token, the place from which on it ends that row
CHOSEN = 14  # by row
FIELDS = 16

GONE = -1  # where no token waits


@entry("int64(int64[::1])")
def begin(step: np.ndarray) -> int:
    """Writes the inputs of a decode step, takes the tokens that wait for it, and makes its slots a
    position longer.

    How many rows are wrong: no token waited for them, or they have no page for their position.
    """
    count, columns, width = step[COUNT], step[COLUMNS], step[WIDTH]
    rows, ids = int64s(step[ROWS], count), int64s(step[IDS], count)
    positions, cells = int64s(step[POSITIONS], count), int64s(step[CELLS], count)
    lens, ends = int64s(step[LENS], count), int64s(step[ENDS], count)
    wrong = 0
    for row in range(count):
        slot = rows[row]
        own, seat = 8 * slot, int64s(step[SEATS] + 8 * slot, 1)[0]
        position = int64s(step[LENGTHS] + 8 * seat, 1)[0]
        column, offset = position // step[PAGE_SIZE], position % step[PAGE_SIZE]
        pages = int64s(step[PAGES] + 8 * columns * seat, columns)
        right = column < width
        cells[row] = pages[column] * step[PAGE_SIZE] + offset if right else 0
        positions[row], lens[row] = position, position + 1
        table = int64s(step[TABLES] + 8 * width * row, width)
        for page in range(width):
            table[page] = pages[page]
        if step[TOKENS]:
            waiting = int64s(step[TOKENS] + own, 1)
            right = right and waiting[0] >= 0
            ids[row], waiting[0] = max(waiting[0], 0), GONE
        wrong += not right
        # a row reads its own slot or slot 0, which is nobody's
        length = int64s(step[LENGTHS] + own, 1)
        length[0] += 1
        ends[row] = length[0]
    return wrong


@inner
def _bury(step: np.ndarray, row: int) -> None:
    slot = int64s(step[ROWS], step[COUNT])[row]
    int64s(step[SEATS] + 8 * slot, 1)[0] = 0


@inner
def _end_rows(step: np.ndarray) -> None:
    """Rows whose token ends them sit in slot 0 from now on."""
    count, owns = step[COUNT], step[OWNS]
    chosen, ends = int64s(step[CHOSEN], count), int64s(step[ENDS], count)
    if step[EOS]:
        over = bytes_at(step[EOS], step[VOCAB])
        for row in range(count):
            heeds = step[HEED] == 0 or int64s(step[HEED], count)[row] > 0
            if heeds and over[chosen[row]]:
                _bury(step, row)
    for rule in range(owns):
        row = int64s(step[OWN], owns)[rule]
        token = int64s(step[OWN] + 8 * owns, owns)[rule]
        since = int64s(step[OWN] + 16 * owns, owns)[rule]
        if chosen[row] == token and ends[row] >= since:
            _bury(step, row)


@entry("void(int64[::1])")
def end(step: np.ndarray) -> None:
    """Writes each row's choice as `choose` does, leaves it for the next step, and buries those whom
    it ends."""
    count = step[COUNT]
    rows, chosen = int64s(step[ROWS], count), int64s(step[CHOSEN], count)
    for row in range(count):
        logits = step[LOGITS] + 4 * step[STRIDE] * row
        masks = step[MASKS] + 4 * step[WORDS] * row if step[MASKS] else 0
        token = chosen_of(logits, step[VOCAB], masks)
        chosen[row] = token
        if step[TOKENS]:
            int64s(step[TOKENS] + 8 * rows[row], 1)[0] = token
    _end_rows(step)
