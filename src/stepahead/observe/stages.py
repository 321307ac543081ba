"""What the host is at: the stages that its time is cut into."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum


class Stage(IntEnum):
    """What the host is at."""

    PLAN = 0
    LAUNCH = 1  # hands a plan over; where the executor is the runner, all that the runner does
    WAIT = 2  # for a flight to land
    RETIRE = 3
    DELIVER = 4  # hands outputs to whoever asked, who has the thread until the next step
    IDLE = 5  # outside a step
    ENCODE = 6  # makes bytes of a plan
    DECODE = 7  # makes a result of bytes
    MASK = 8  # makes a grammar's masks, or waits for them
    MAIL = 9  # takes in requests and aborts
    GC = 10  # Python looks for cycles


WORK = tuple(stage for stage in Stage if stage not in (Stage.WAIT, Stage.IDLE))
REST = (Stage.WAIT, Stage.IDLE)

# Begins a stage and says when that was; who works in stages on the host's thread is given one.
Enter = Callable[[Stage], int]
