"""The guards of the engine, each with the mutation that takes it out and the test that must notice.

`scripts/mutants` runs them all; a few run in the ordinary suite.  docs/proof.md is this list as a
table.
"""

from __future__ import annotations

from mutations import (
    cache,
    device,
    drafts,
    ends,
    explain,
    grammar,
    hooks,
    kernels,
    late,
    model,
    observe,
    pipeline,
    probes,
    runner,
    sampling,
    scheduler,
    serve,
    trace,
    watch,
)

MUTATIONS = [
    *runner.MUTATIONS,
    *sampling.MUTATIONS,
    *hooks.MUTATIONS,
    *scheduler.MUTATIONS,
    *cache.MUTATIONS,
    *model.MUTATIONS,
    *kernels.MUTATIONS,
    *device.MUTATIONS,
    *ends.MUTATIONS,
    *drafts.MUTATIONS,
    *pipeline.MUTATIONS,
    *observe.MUTATIONS,
    *probes.MUTATIONS,
    *trace.MUTATIONS,
    *watch.MUTATIONS,
    *explain.MUTATIONS,
    *serve.MUTATIONS,
    *grammar.MUTATIONS,
    *late.MUTATIONS,
]
