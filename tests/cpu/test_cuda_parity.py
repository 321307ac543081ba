"""Promise 1 with the CUDA device on its stand-in: every loop, fence and way to copy."""

from __future__ import annotations

import pytest
from fake_cuda import FakeCuda, install

from cuda_engines import play_on_cuda
from engines import ORACLE, Variant
from harness import differences, exactly, play
from stepahead.device import cuda as house
from stepahead.device.base import Stream
from stepahead.device.cuda import CudaDevice
from workloads import workload

VARIANTS = [
    Variant("serial", "cuda"),
    Variant("overlap", "cuda"),
    Variant("overlap", "cuda", fence="coarse"),
    Variant("batch-queue", "cuda", depth=3),
]


@pytest.mark.parametrize("copies", ["overlap", "block"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_client_hears_the_same(
    monkeypatch: pytest.MonkeyPatch, variant: Variant, copies: str
) -> None:
    fake = FakeCuda()
    fake.blocking_copies = copies == "block"
    install(monkeypatch, fake)
    monkeypatch.setattr(house, "_PROBE_CYCLES", 4_000_000)
    steps = 0
    for seed in range(3):
        work = workload(seed)
        other = play_on_cuda(work, variant)
        assert differences(play(work, ORACLE), other, exactly) == []
        steps += other.steps
    assert steps > 30
    check_calls(fake, steps)


def check_calls(fake: FakeCuda, steps: int) -> None:
    """No event was recorded twice, and no copy was pageable, blocking or on another stream's."""
    assert all(event.records <= 1 or event.external for event in fake.events)
    assert all(event.blocking or event.external for event in fake.events)
    assert len(fake.events) > 3 * steps
    assert fake.current is fake.default
    assert all(non_blocking for _, non_blocking, _ in fake.copies)
    down = {stream for stream, _, to_host in fake.copies if to_host}
    up = {stream for stream, _, to_host in fake.copies if not to_host}
    assert 0 not in down | up, "a copy ran on the default stream"
    assert not down & up, "results and plans went through one stream"


def test_operations_keep_off_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    install(monkeypatch, fake)
    seen: set[int] = set()
    real = CudaDevice.enqueue

    def watched(self: CudaDevice, stream: Stream, fn: object, *names: object) -> None:
        real(self, stream, lambda: (seen.add(fake.current.cuda_stream), fn())[1], *names)

    monkeypatch.setattr(CudaDevice, "enqueue", watched)
    play_on_cuda(workload(0), VARIANTS[1])
    assert seen
    assert 0 not in seen
