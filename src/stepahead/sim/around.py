"""An engine around any model factory: what the benchmarks and the demo run on."""

from __future__ import annotations

from typing import Any

from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.engine import Engine
from stepahead.loop.base import Executor
from stepahead.runner.spec import RunnerSpec
from stepahead.scheduler.stop import Vocabulary


def engine_around(
    factory: str, options: dict[str, Any], facts: ModelFacts, config: EngineConfig
) -> Engine:
    """Builds runner, executor and engine; `factory` is "module:function", called with `options`."""
    resolved = resolve(config, facts)
    settled = resolved.config
    spec = RunnerSpec(
        factory=factory,
        options=options,
        device=settled.device,
        device_seed=settled.device_seed,
        num_slots=settled.num_slots,
        num_pages=resolved.pages,
        page_size=settled.page_size,
        max_pages=-(-resolved.model_len // settled.page_size),
        eos_ids=facts.eos_ids,
        threads=settled.threads or 1,
    )
    return Engine(
        resolved, _executor(spec, settled.executor), Vocabulary([b"x"] * facts.vocab_size)
    )


def _executor(spec: RunnerSpec, kind: str) -> Executor:
    if kind == "process":
        from stepahead.executor.process import ProcessExecutor

        return ProcessExecutor(spec)
    from stepahead.executor.inline import InlineExecutor
    from stepahead.runner.build import build_runner

    return InlineExecutor(build_runner(spec))
