"""The hostile device finds a missing edge: by its clocks at once, by its orders sooner or later.

A device that found nothing would let every parity test on it pass, so it is tested on runners and
small programs that are wrong on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import Variant, resolved, runner_spec, toy_engine
from harness import Client, play
from stepahead.device.base import Event, Stream
from stepahead.device.clocks import RaceError
from stepahead.device.eager import EagerDevice
from stepahead.device.hostile import POISON, HostileDevice
from stepahead.device.queues import StuckError
from stepahead.errors import EngineError
from stepahead.executor.inline import InlineExecutor
from stepahead.model.toy import ToyModel
from stepahead.runner.runner import Runner
from stepahead.sync import SyncReason
from stepahead.types import SamplingParams
from workloads import Ask, Workload

SCHEDULE, FORWARD, COPY = Stream.SCHEDULE, Stream.FORWARD, Stream.COPY
SEEDS = range(40)
OPTIONS = {"vocab_size": 64, "max_model_len": 48, "page_size": 4, "max_rows": 3, "num_pages": 20}
# six requests of all kinds over three rows
WORK = Workload(
    0,
    OPTIONS | {"max_step_tokens": 8},
    tuple(
        Ask(
            at=2 * i,
            prompt=(5, 6, 7, 8, *range(20, 22 + i)),
            params=SamplingParams(
                temperature=i % 2,
                seed=i,
                max_tokens=4 + i,
                presence_penalty=i // 2 % 2,
                min_tokens=i % 3,
                ignore_eos=True,
            ),
        )
        for i in range(6)
    ),
)


def nothing() -> None:
    """An operation that only declares what it touches."""


def after(device: HostileDevice, later: Stream, earlier: Stream) -> None:
    """The edge between two streams."""
    device.wait(later, device.record(earlier))


def brings(device: HostileDevice, name: str) -> None:
    """Schedule writes this memory."""
    device.enqueue(SCHEDULE, nothing, writes=(name,))


# --- one missing edge at a time -------------------------------------------------------------


def reads_before_written(device: HostileDevice) -> None:
    """Forward reads what schedule brings, and doesn't wait for it."""
    brings(device, "inputs")
    device.enqueue(FORWARD, nothing, reads=("inputs",))


def copies_before_computed(device: HostileDevice) -> None:
    """Copy takes out what forward makes, and doesn't wait for it."""
    device.enqueue(FORWARD, nothing, writes=("results",))
    device.download(lambda: torch.zeros(1), "results")


def overwrites_what_is_read(device: HostileDevice) -> None:
    """A buffer is used again while the step before may still read it."""
    brings(device, "buffer")
    after(device, FORWARD, SCHEDULE)
    device.enqueue(FORWARD, nothing, reads=("buffer",))
    brings(device, "buffer")


def overwrites_what_is_written(device: HostileDevice) -> None:
    """Two streams write the same memory."""
    device.enqueue(SCHEDULE, nothing, writes=("table",))
    device.enqueue(FORWARD, nothing, writes=("table",))


def waits_for_too_early_a_point(device: HostileDevice) -> None:
    """The event was recorded before the copy that it is to cover."""
    event = device.record(SCHEDULE)
    brings(device, "inputs")
    device.wait(FORWARD, event)
    device.enqueue(FORWARD, nothing, reads=("inputs",))


def waits_in_the_wrong_stream(device: HostileDevice) -> None:
    """Copy waits for schedule; forward is what reads."""
    brings(device, "inputs")
    after(device, COPY, SCHEDULE)
    device.enqueue(FORWARD, nothing, reads=("inputs",))


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (reads_before_written, ("'inputs'", "forward reads", "by stream schedule")),
        (copies_before_computed, ("'results'", "copy reads", "by stream forward")),
        (overwrites_what_is_read, ("'buffer'", "overwrites what is being read", "forward")),
        (overwrites_what_is_written, ("'table'", "overwrites what is being written", "schedule")),
        (waits_for_too_early_a_point, ("'inputs'", "forward reads", "by stream schedule")),
        (waits_in_the_wrong_stream, ("'inputs'", "forward reads", "by stream schedule")),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_missing_edge_is_named_whatever_the_order(
    program: Callable[[HostileDevice], None], names: tuple[str, ...], seed: int
) -> None:
    with pytest.raises(RaceError) as caught:
        program(HostileDevice(seed))
    assert [name for name in names if name not in str(caught.value)] == []


@pytest.mark.parametrize("seed", range(5))
def test_declared_edges_are_no_races(seed: int) -> None:
    device = HostileDevice(seed)
    for step in range(4):
        brings(device, f"inputs {step}")
        after(device, FORWARD, SCHEDULE)
        device.enqueue(FORWARD, nothing, (f"inputs {step}", "kv"), ("kv", f"results {step}"))
        after(device, COPY, FORWARD)
        # an edge reaches on: copy comes after schedule, through forward
        device.download(lambda: torch.zeros(1), f"results {step}")
        device.enqueue(COPY, nothing, reads=(f"inputs {step}",))


def test_what_the_host_has_seen_is_an_edge() -> None:
    device = HostileDevice(0)
    brings(device, "buffer")
    after(device, FORWARD, SCHEDULE)
    device.enqueue(FORWARD, nothing, reads=("buffer",))
    device.record(FORWARD).wait()
    brings(device, "buffer")  # the step that read it has landed


# --- orders, poison, failures ---------------------------------------------------------------


def orders(edge: bool) -> set[tuple[str, ...]]:
    """The orders in which a1, a2 of one stream and b1, b2 of another run, by seed."""
    seen = set()
    for seed in range(200):
        device, ran = HostileDevice(seed), []
        for stream, name in ((SCHEDULE, "a"), (FORWARD, "b")):
            if edge and name == "b":
                after(device, FORWARD, SCHEDULE)
            for i in (1, 2):
                device.enqueue(stream, lambda ran=ran, step=f"{name}{i}": ran.append(step))
        device.record(SCHEDULE).wait()
        device.record(FORWARD).wait()
        seen.add(tuple(ran))
    return seen


def test_without_an_edge_every_interleaving_happens() -> None:
    legal = {
        order
        for order in itertools.permutations(("a1", "a2", "b1", "b2"))
        if order.index("a1") < order.index("a2") and order.index("b1") < order.index("b2")
    }
    assert orders(edge=False) == legal


def test_with_an_edge_only_one_order_is_left() -> None:
    assert orders(edge=True) == {("a1", "a2", "b1", "b2")}


@given(
    st.lists(st.tuples(st.sampled_from(list(Stream)), st.integers(0, 8)), max_size=20),
    st.integers(0, 1 << 30),
)
def test_streams_run_in_order_and_edges_hold(program: list[tuple[Stream, int]], seed: int) -> None:
    """Operation i runs in a stream, after operation `i - back` if that is in another one."""
    device, ran, events = HostileDevice(seed), [], []
    for i, (stream, back) in enumerate(program):
        if 0 < back <= i:
            device.wait(stream, events[i - back])
        device.enqueue(stream, lambda i=i: ran.append(i))
        events.append(device.record(stream))
    for event in events:
        event.wait()
    assert sorted(ran) == list(range(len(program)))
    place = {operation: at for at, operation in enumerate(ran)}
    for i, (stream, back) in enumerate(program):
        before = [j for j in range(i) if program[j][0] is stream]
        before += [i - back] if 0 < back <= i else []
        assert all(place[j] < place[i] for j in before)


def test_one_seed_is_one_order() -> None:
    def order(seed: int) -> list[int]:
        device, ran = HostileDevice(seed), []
        for i in range(30):
            device.enqueue(list(Stream)[i % 3], lambda i=i: ran.append(i))
        for stream in Stream:
            device.record(stream).wait()
        return ran

    assert order(4) == order(4)
    assert len({tuple(order(seed)) for seed in range(20)}) == 20


def test_memory_is_poison_until_its_copy_has_run() -> None:
    poisoned = 0
    for seed in SEEDS:
        device = HostileDevice(seed)
        staging = device.stage(0)
        arrives = staging.add(np.array([4, 5]))
        staging.send()
        after(device, FORWARD, SCHEDULE)
        after(device, COPY, FORWARD)
        leaves = device.download(lambda arrives=arrives: arrives + 1, staging.name)
        # `values`: for who reads without asking
        poisoned += POISON in leaves.values.tolist() and POISON in arrives.tolist()
        device.record(COPY).wait()
        assert leaves.read().tolist() == [5, 6]
    assert poisoned > len(SEEDS) / 4, "the device is too eager to show a missing wait"


def test_a_result_is_a_copy() -> None:
    device, source = HostileDevice(0), torch.zeros(2)
    leaves = device.download(lambda: source, "results")
    device.record(COPY).wait()
    source.fill_(7)  # the next step uses the memory again
    assert leaves.read().tolist() == [0.0, 0.0]


def test_the_host_is_told_when_nothing_can_reach_its_event() -> None:
    device, elsewhere = HostileDevice(0), HostileDevice(0)
    device.wait(FORWARD, elsewhere.record(COPY))  # an event that this device never passes
    event = device.record(FORWARD)
    assert not event.done()
    with pytest.raises(StuckError, match="nothing will reach"):
        event.wait()


def test_an_operations_error_surfaces_at_the_wait_and_stops_the_device() -> None:
    for seed in SEEDS:
        device, ran = HostileDevice(seed), []

        def fails() -> None:
            raise ValueError("out of memory")

        device.enqueue(FORWARD, fails)
        device.enqueue(FORWARD, lambda ran=ran: ran.append(1))
        with pytest.raises(ValueError, match="out of memory"):
            device.record(FORWARD).wait()
        assert ran == []


def test_a_failure_stops_its_stream_and_what_waits_for_it() -> None:
    """A step whose forward has run once landed with the error of the step after it, if its copy was
    still to come."""
    for seed in SEEDS:
        device, copied, landings = HostileDevice(seed), [], []
        for step in (1, 2, 0):
            device.enqueue(FORWARD, lambda step=step: 1 / step)
            after(device, COPY, FORWARD)
            device.enqueue(COPY, lambda step=step, copied=copied: copied.append(step))
            landings.append(device.record(COPY))
        with pytest.raises(ZeroDivisionError):
            landings[2].wait()
        landings[0].wait()
        landings[1].wait()
        assert copied == [1, 2]


def test_a_second_thread_is_refused() -> None:
    device = HostileDevice(0)
    device.enqueue(FORWARD, nothing)
    event = device.record(FORWARD)
    staging = device.stage(0)
    leaves = device.download(lambda: torch.zeros(1), "results")
    with ThreadPoolExecutor(1) as other:
        for use in (
            event.done,
            event.wait,
            lambda: device.enqueue(FORWARD, nothing),
            lambda: device.wait(COPY, event),
            lambda: device.record(COPY),
            lambda: device.sync(event, SyncReason.DRAIN),
            lambda: device.stage(0),
            lambda: staging.add(np.arange(3)),
            lambda: device.download(lambda: torch.zeros(1), "results"),
            leaves.read,
            lambda: device.free(("results",)),
            lambda: device.capture(nothing, nothing),
            lambda: device.spend(1),
            event.at_ns,
        ):
            with pytest.raises(EngineError, match="one thread, and a second one uses it"):
                other.submit(use).result()
    event.wait()


# --- the whole engine -----------------------------------------------------------------------


DEPTH = {"serial": 1, "overlap": 2}


class Forgetful(HostileDevice):
    """Forgets the waits of one stream; may also be blind to races."""

    def __init__(self, seed: int, depth: int, forgets: Stream, blind: bool = False) -> None:
        super().__init__(seed, depth)
        self._forgets = forgets
        self._blind = blind

    def wait(self, stream: Stream, event: Event) -> None:
        """As it should be, but for the stream that is forgotten."""
        if stream is not self._forgets:
            super().wait(stream, event)

    def _access(self, stream: Stream, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        if not self._blind:
            super()._access(stream, reads, writes)


def play_on(device: HostileDevice | EagerDevice, work: Workload, loop: str) -> list[list[int]]:
    """The tokens of each client of a workload, on this device."""
    variant = Variant(loop, "hostile")
    spec = runner_spec(resolved(work.options, variant))
    model = ToyModel(**spec.options)
    runner = Runner(model, device, spec, model.vocab_size)
    engine = toy_engine(work.options, variant, executor=InlineExecutor(runner))
    return [told.tokens for told in Client(engine, work).play().told.values()]


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize(
    ("forgets", "memory"), [(Stream.FORWARD, "staging 0"), (Stream.COPY, "results 0")]
)
def test_the_engine_without_an_edge_is_a_race(loop: str, forgets: Stream, memory: str) -> None:
    with pytest.raises(AssertionError, match=f"RaceError: race on '{memory}'"):
        play_on(Forgetful(3, DEPTH[loop], forgets), WORK, loop)


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("forgets", [Stream.FORWARD, Stream.COPY])
def test_the_engine_without_an_edge_shows_even_to_the_blind(loop: str, forgets: Stream) -> None:
    # no clocks: it is the order and the poison that make it fail, for nearly every seed
    right = [told.tokens for told in play(WORK).told.values()]
    failed = 0
    for seed in range(8):
        try:
            failed += (
                play_on(Forgetful(seed, DEPTH[loop], forgets, blind=True), WORK, loop) != right
            )
        except AssertionError:
            failed += 1
    assert failed >= 7


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_the_engine_with_its_edges_is_right_on_both_devices(loop: str) -> None:
    right = [told.tokens for told in play(WORK).told.values()]
    assert sum(map(len, right)) == 4 + 5 + 6 + 7 + 8 + 9
    assert play_on(EagerDevice(), WORK, loop) == right
    for seed in range(8):
        assert play_on(HostileDevice(seed, DEPTH[loop]), WORK, loop) == right


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_the_host_waits_once_a_step(loop: str) -> None:
    # promise 4: no wait but a flight's own
    device = HostileDevice(2, DEPTH[loop])
    spec = runner_spec(resolved(WORK.options, Variant(loop, "hostile")))
    model = ToyModel(**spec.options)
    runner = Runner(model, device, spec, model.vocab_size)
    engine = toy_engine(WORK.options, Variant(loop, "hostile"), executor=InlineExecutor(runner))
    run = Client(engine, WORK).play()
    assert device.counts.host_waits == device.counts.landings == run.counts["steps"]
