"""The guards of the engine, each with the mutation that takes it out and the test that must notice.

`scripts/mutants` runs them all; a few run in the ordinary suite.  docs/proof.md is this list as a
table.
"""

from __future__ import annotations

from mutations import cache, device, ends, explain, model, runner, sampling, scheduler, serve

MUTATIONS = [
    *runner.MUTATIONS,
    *sampling.MUTATIONS,
    *scheduler.MUTATIONS,
    *cache.MUTATIONS,
    *model.MUTATIONS,
    *device.MUTATIONS,
    *ends.MUTATIONS,
    *explain.MUTATIONS,
    *serve.MUTATIONS,
]
