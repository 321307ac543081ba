"""Who hears an engine's outputs to their end, and holds it to one terminal message each."""

from __future__ import annotations

from typing import Any

from stepahead.engine import Engine
from stepahead.errors import EngineClosed
from stepahead.executor.process import ProcessExecutor
from stepahead.types import Finish, Outputs, SamplingParams

OPTIONS: dict[str, Any] = {
    "vocab_size": 64,
    "max_model_len": 64,
    "page_size": 4,
    "max_rows": 3,
    "num_pages": 60,
    "max_step_tokens": 8,  # prompts come in chunks
}
# (loop, depth): 0 is the loop's own
LOOPS = [("serial", 0), ("overlap", 0), ("batch-queue", 0), ("batch-queue", 4)]
ENDLESS = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)


class Listener:
    """Asks more than fits, and writes down what it hears."""

    def __init__(self, engine: Engine, count: int = 5) -> None:
        self.engine = engine
        self.prompts = {
            rid: prompt
            for first in range(2, 2 + count)
            for prompt in ([first, *range(3, 12)],)
            for rid in engine.add(prompt, ENDLESS)
        }
        self.tokens: dict[int, list[int]] = {rid: [] for rid in self.prompts}
        self.ends: dict[int, Finish] = {}
        self.error: BaseException | None = None

    def listen(self) -> None:
        """Steps to the end; for a thread of its own too."""
        try:
            while self.engine.has_work:
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        """One step, heard."""
        outputs = self.engine.step()
        if outputs is not None:
            self.hear(outputs)

    def hear(self, outputs: Outputs) -> None:
        """What one step brought."""
        for rid, token in zip(outputs.rids.tolist(), outputs.tokens.tolist(), strict=True):
            assert rid not in self.ends, "a token after the end"
            self.tokens[rid].append(token)
        for finish in outputs.finishes:
            assert finish.rid not in self.ends, "two ends"
            self.ends[finish.rid] = finish

    def check(self, reason: str, right: dict[int, list[int]]) -> None:
        """All have ended, once and with `reason` (unless by length before); what was published is
        what the end lists and the beginning of what is `right`; nothing is left in the engine."""
        assert self.error is None, self.error
        assert set(self.ends) == set(self.prompts)
        assert {end.reason for end in self.ends.values()} <= {reason, "length"}
        assert reason in {end.reason for end in self.ends.values()}
        for rid, end in self.ends.items():
            assert end.tokens.tolist() == self.tokens[rid]
            assert self.tokens[rid] == right[rid][: len(self.tokens[rid])]
        self.check_at_rest()

    def check_at_rest(self) -> None:
        """Slots, pages and pins are back, nothing is in the air, and nothing more comes."""
        engine = self.engine
        engine.scheduler.check_at_rest()
        assert engine.scheduler.in_flight == engine._core.flights == 0
        assert not engine.has_work
        try:
            engine.step()
        except EngineClosed:
            return
        raise AssertionError("an engine that has ended still steps")


def gone(executor: ProcessExecutor) -> bool:
    """Whether its worker has ended and was waited for."""
    return executor.child.wait(0)
