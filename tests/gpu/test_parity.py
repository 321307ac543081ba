"""Promise 1 on a real GPU: what the toy's clients hear does not depend on device, loop or fence.

The same test runs on a stand-in in tests/cpu/test_cuda_parity.py.  Not yet run on a GPU.
"""

from __future__ import annotations

import pytest

from cuda_engines import play_on_cuda
from engines import ORACLE, Variant
from harness import differences, exactly, play
from workloads import workload

VARIANTS = [
    Variant(loop, "cuda", depth=depth, fence=fence)
    for loop, depth in (("serial", 0), ("overlap", 0), ("batch-queue", 0), ("batch-queue", 4))
    for fence in ("fine", "coarse")
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_client_hears_the_same(seed: int, variant: Variant) -> None:
    work = workload(seed)
    assert differences(play(work, ORACLE), play_on_cuda(work, variant), exactly) == []
