"""`stepahead serve` around a device that sleeps 1 ms a step and leaves the cores to the host.

The front and the engine's process both begin here, with the words that `stepahead serve` takes:
only the model is replaced, as beside an accelerator.
"""

from __future__ import annotations

import sys

from stepahead import assemble
from stepahead.assemble import ModelParts
from stepahead.config import EngineConfig, ModelFacts
from stepahead.text.texts import ToyTexts

STEP_MS = 1.0
VOCAB = 512
MAX_LEN = 1 << 17


def sleeping_parts(config: EngineConfig, chat_template: str | None = None) -> ModelParts:
    """Every token is the same; the text is the toy's."""
    facts = ModelFacts(VOCAB, MAX_LEN, eos_ids=(), kv_bytes_per_token=1)
    options = {"forward_ms": STEP_MS, "vocab_size": VOCAB}
    return ModelParts(facts, ToyTexts(VOCAB), "stepahead.sim.sleep:SleepModel", options)


def main(read_fd: int, write_fd: int) -> None:
    """The engine's process."""
    from stepahead.serve import back

    # reaches in, so that no server carries a hook that only a benchmark needs
    assemble.model_parts = sleeping_parts
    back.main(read_fd, write_fd)


def serve() -> None:
    """The front."""
    from stepahead.cli.main import run_command
    from stepahead.executor.stops import hear_stops
    from stepahead.serve import link, server

    server.model_parts = sleeping_parts
    link._BACK = "load_server"
    hear_stops()
    sys.exit(run_command(["serve", "sleep", *sys.argv[1:]]))


if __name__ == "__main__":
    serve()
