"""What a GPU says: the CUDA device works, gives the CPU's answers, and how it overlaps.

Not yet run on a GPU.  Made to take less than four minutes on an H200, without a network:

    PYTHONPATH=src:build/gpu-site python benchmarks/gpu_check.py

It needs torch >= 2.11 built for CUDA and numpy, beside them msgspec, gguf and safetensors, and what
gguf wants (tqdm, pyyaml; transformers brings both).  What is missing can be brought in a folder,
here for Python 3.12 on x86-64:

    pip install --target build/gpu-site --python-version 3.12 --only-binary=:all: --no-deps \\
        --platform manylinux2014_x86_64 msgspec gguf safetensors

It runs these checks; one that fails says why, and the others go on:

device      streams are distinct, copies do not block, the event inside a graph passes half-way in
            each of three replays, the host sleeps while it waits
toy         random workloads on the hash model, every loop and fence: each client hears exactly what
            the serial loop on the CPU says
attention   torch's paged kernel against plain operations, and which of them a model gets
float32     a tiny random Llama, greedy, every loop and fence, against the serial loop on the CPU:
            equal tokens unless the best two differ by less than 1e-3
bfloat16    the shape of a Llama of 1.2 B, random weights: the overlap loop against the serial one
            on the GPU, and the CPU's first tokens, each equal unless the best two differ by less
            than 0.15
speed       that model, 64 rows, prompts of 128 tokens, 128 tokens each, no stop rules; serial and
            overlap loop in turn, three times each, with and without captured graphs, in the calling
            process.  Of steps that only decode: tokens a second, the device's time from the start
            of one forward to that of the next, the gap from the end of one forward to the start of
            the next, and how often results were on the host inside the next forward

A table for people; the last line is JSON: {"bench": "gpu_check", "gpu", "torch", "failed": [names],
"seconds", and one object for each check}.  Times are medians, microseconds by the device's own
events; `copies_inside` is a share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepahead.config import EngineConfig, ModelFacts, resolve
from stepahead.device.base import Stream, Work
from stepahead.device.cuda import CudaDevice
from stepahead.device.eager import EagerDevice
from stepahead.engine import Engine, limits_of
from stepahead.model.attention import varlen
from stepahead.model.attention.paged import HeadShape
from stepahead.model.spec import ModelSpec, kv_bytes_per_token
from stepahead.model.weights import random_model
from stepahead.plan import Plan, Result
from stepahead.runner.flight import RunnerFlight
from stepahead.runner.runner import Runner
from stepahead.runner.spec import RunnerSpec
from stepahead.scheduler.stop import Vocabulary
from stepahead.text.texts import ToyTexts
from stepahead.types import SamplingParams

TESTS = Path(__file__).resolve().parent.parent / "tests"  # workloads for the toy are there
LOOPS = ("serial", "overlap", "batch-queue")
FENCES = ("fine", "coarse")


TINY = ModelSpec("LlamaForCausalLM", 512, 128, 256, 3, 4, 2, 32, 512)
LARGE = ModelSpec("LlamaForCausalLM", 128_256, 2048, 8192, 16, 32, 8, 64, 512, tied_head=True)


@dataclass(frozen=True)
class Sizes:
    """How much to do; `place` is where torch puts the models."""

    place: str = "cuda"
    cycles: int = 100_000_000
    toy_seeds: int = 3
    tiny: ModelSpec = TINY
    large: ModelSpec = LARGE
    rows: int = 64
    prompt: int = 128
    tokens: int = 128
    repeats: int = 3


# --- an engine around a model that is there already -------------------------------------------


@dataclass(frozen=True)
class Times:
    """A step by the device's events, on the host's clock in nanoseconds."""

    rows: int
    chunks: int
    start_ns: int
    end_ns: int
    copied_ns: int


class WatchedFlight:
    """A flight that leaves its times when it lands."""

    def __init__(self, plan: Plan, rows: int, flight: RunnerFlight, seen: list[Times]) -> None:
        self._chunks = len(plan.chunk_table)
        self._rows = rows
        self._flight = flight
        self._seen = seen

    def land(self) -> Result:
        """As the flight."""
        result, flight = self._flight.land(), self._flight
        times = (flight.start.at_ns(), flight.end.at_ns(), flight.first.event.at_ns())
        self._seen.append(Times(self._rows, self._chunks, *times))
        return result


class Watched:
    """The runner in this thread, and when its steps ran."""

    def __init__(self, runner: Runner) -> None:
        self.seen: list[Times] = []
        self._runner = runner
        self._rows = 0

    def launch(self, plan: Plan) -> WatchedFlight:
        """As the runner."""
        self._rows = self._rows if plan.same_rows else len(plan.rows)
        return WatchedFlight(plan, self._rows, self._runner.launch(plan), self.seen)

    def close(self) -> None:
        """Closes the runner."""
        self._runner.close()


@dataclass
class Told:
    """One request's tokens, and by how much the best token led at each; infinity unless asked."""

    tokens: list[int] = field(default_factory=list)
    lead: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ran:
    """What came of one run."""

    told: list[Told]
    steps: list[Times]
    seconds: float


def run(
    model: Any,
    spec: ModelSpec,
    dtype: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    loop: str = "serial",
    fence: str = "fine",
    on_gpu: bool = True,
) -> Ran:
    """All prompts at once on a new engine around the model."""
    config = EngineConfig(
        "random",
        loop=loop,
        fence=fence,
        executor="inline",
        dtype=dtype,
        max_rows=len(prompts),
        max_step_tokens=2048,
        max_model_len=spec.max_len,
        num_pages=len(prompts) * -(-spec.max_len // 16),
        prefix_cache=False,
        threads=torch.get_num_threads(),
    )
    kv_bytes = kv_bytes_per_token(spec, 4 if dtype == "float32" else 2)
    facts = ModelFacts(spec.vocab_size, spec.max_len, (), kv_bytes)
    resolved = resolve(config, facts, bytes_available=1 << 40)
    runner_spec = RunnerSpec(
        *("", {}, "cuda" if on_gpu else "cpu"),
        max_rows=config.max_rows,
        num_slots=config.num_slots,
        num_pages=resolved.pages,
        page_size=config.page_size,
        max_pages=limits_of(resolved).max_pages,
        relay=config.relay,
        depth=config.steps_ahead,
        fence=fence,
    )
    device = CudaDevice(config.steps_ahead) if on_gpu else EagerDevice()
    watched = Watched(Runner(model, device, runner_spec, spec.vocab_size))
    texts = ToyTexts(spec.vocab_size)
    engine = Engine(resolved, watched, Vocabulary(texts.token_bytes, texts.special_ids))
    try:
        return play(engine, watched, prompts, params)
    finally:
        engine.close()


def play(
    engine: Engine, watched: Watched, prompts: Sequence[list[int]], params: SamplingParams
) -> Ran:
    """Adds all prompts and steps until nothing is left."""
    told = {engine.add(prompt, params)[0]: Told() for prompt in prompts}
    began = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        if outputs is None:
            continue
        leads = np.full(len(outputs.tokens), np.inf)
        if outputs.logprobs is not None:
            best = outputs.logprobs.top.reshape(-1, outputs.logprobs.width)
            leads[outputs.logprobs.rows] = best[:, 0] - best[:, 1]
        for rid, token, lead in zip(outputs.rids, outputs.tokens, leads, strict=True):
            told[int(rid)].tokens.append(int(token))
            told[int(rid)].lead.append(float(lead))
        for finish in outputs.finishes:
            assert finish.reason == "length", f"a request ended by {finish.reason}: {finish}"
    return Ran(list(told.values()), watched.seen, time.perf_counter() - began)


def differences(right: Ran, other: Ran, lead: float) -> dict[str, Any]:
    """Requests that are equal, that differ where the best two were close, and that just differ."""
    found = {"equal": 0, "close": 0, "wrong": 0}
    for one, two in zip(right.told, other.told, strict=True):
        pairs = zip(one.tokens, two.tokens, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            found["equal"] += 1
        else:
            found["close" if one.lead[place] < lead else "wrong"] += 1
    return found


def prompts_of(spec: ModelSpec, rows: int, length: int) -> list[list[int]]:
    """Random prompts around a length, the same each time."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(max(1, length // 2), length + 1, rows)
    return [draw.integers(2, spec.vocab_size, count).tolist() for count in lengths]


# --- the checks -------------------------------------------------------------------------------


def check_device(sizes: Sizes) -> dict[str, Any]:
    """Streams, waits and the event inside a graph."""
    device = CudaDevice(2)
    handles = [device._streams[stream].cuda_stream for stream in Stream]
    assert len({0, *handles}) == 4, f"streams are not distinct: {handles}"

    def busy() -> None:
        torch.cuda._sleep(sizes.cycles)

    device.enqueue(Stream.FORWARD, busy)
    event = device.record(Stream.FORWARD)
    wall, cpu = time.perf_counter(), time.process_time()
    event.wait()
    spun = (time.process_time() - cpu) / (time.perf_counter() - wall)
    assert spun < 0.5, f"the host spun for {spun:.0%} of a wait"
    halves = []
    graph = device.capture(busy, busy)
    for _ in range(3):
        start = device.record(Stream.FORWARD)
        between = graph.launch(Work(busy), Work(busy))
        end = device.record(Stream.FORWARD)
        end.wait()
        whole_ns = end.at_ns() - start.at_ns()
        halves.append(round((between.at_ns() - start.at_ns()) / whole_ns, 2))
    device.close()
    assert all(0.3 < half < 0.7 for half in halves), f"in-graph events passed at {halves}"
    return {"copies_block": device.copies_block, "event_in_graph_at": halves}


def check_toy(sizes: Sizes) -> dict[str, Any]:
    """Exact parity on the hash model."""
    sys.path.insert(0, str(TESTS))
    from cuda_engines import play_on_cuda
    from engines import ORACLE, Variant
    from harness import differences as unlike
    from harness import exactly
    from harness import play as play_on_cpu
    from workloads import workload

    steps = 0
    for seed in range(sizes.toy_seeds):
        work = workload(seed)
        right = play_on_cpu(work, ORACLE)
        for loop in LOOPS:
            for fence in FENCES:
                variant = Variant(loop, "cuda", fence=fence)
                other = play_on_cuda(work, variant)
                lines = unlike(right, other, exactly)
                assert not lines, f"seed {seed} {variant}: {lines[0]}"
                steps += other.steps
    return {"workloads": sizes.toy_seeds * len(LOOPS) * len(FENCES), "steps": steps}


def check_attention(sizes: Sizes) -> dict[str, Any]:
    """Which attention a model gets, by page size and dtype; that it is right was tried with it."""
    found = {}
    for page_size in (16, 256):
        for dtype in (torch.float32, torch.bfloat16):
            shape = HeadShape(32, 8, 64, dtype, page_size)
            kernel = varlen.paged_kernel(shape, torch.device(sizes.place, 0))
            name = f"{str(dtype).removeprefix('torch.')} pages of {page_size}"
            found[name] = "torch's kernel" if kernel is not None else "plain operations"
    return found


def check_float32(sizes: Sizes) -> dict[str, Any]:
    """A tiny model on both devices."""
    spec = sizes.tiny
    prompts = prompts_of(spec, 12, 70)
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    on_cpu, model = (random_model(spec, 0, "float32", place) for place in ("cpu", sizes.place))
    right = run(on_cpu, spec, "float32", prompts, params, on_gpu=False)
    found = {}
    for loop in LOOPS:
        for fence in FENCES:
            other = run(model, spec, "float32", prompts, params, loop=loop, fence=fence)
            counts = differences(right, other, 1e-3)
            assert not counts["wrong"], f"{loop}, {fence}: {counts}"
            found[f"{loop} {fence}"] = counts
    return found


def check_bfloat16(sizes: Sizes, model: Any) -> dict[str, Any]:
    """The large model: overlap against serial on the GPU, and the CPU's first tokens."""
    spec = sizes.large
    prompts = prompts_of(spec, 4, 48)
    long = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2)
    serial = run(model, spec, "bfloat16", prompts, long)
    overlap = run(model, spec, "bfloat16", prompts, long, loop="overlap")
    on_cpu = random_model(spec, 0, "bfloat16")
    few = replace_tokens(long, 6)
    right = run(on_cpu, spec, "bfloat16", prompts, few, on_gpu=False)
    other = run(model, spec, "bfloat16", prompts, few, loop="overlap")
    found = {
        "overlap against serial": differences(serial, overlap, 0.15),
        "against the cpu": differences(right, other, 0.15),
    }
    wrong = {name: counts for name, counts in found.items() if counts["wrong"]}
    assert not wrong, f"{wrong}"
    return found


def replace_tokens(params: SamplingParams, count: int) -> SamplingParams:
    """The same, but for fewer tokens."""
    return SamplingParams(
        temperature=params.temperature, max_tokens=count, logprobs=params.logprobs
    )


def check_speed(sizes: Sizes, model: Any) -> dict[str, Any]:
    """Serial against overlap, with graphs and without."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(sizes.repeats):
        for graphs in (True, False):
            for loop in ("serial", "overlap"):
                name = f"{loop} {'graphs' if graphs else 'plain'}"
                found.setdefault(name, []).append(speed(sizes, model, loop, graphs))
    return {
        name: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
        for name, runs in found.items()
    }


def speed(sizes: Sizes, model: Any, loop: str, graphs: bool) -> dict[str, float]:
    """One run, of its steps that decode every row and do nothing else."""
    spec = sizes.large
    prompts = prompts_of(spec, sizes.rows, sizes.prompt)
    params = SamplingParams(temperature=0.0, max_tokens=sizes.tokens)
    if not graphs:
        model.can_capture = never
    try:
        ran = run(model, spec, "bfloat16", prompts, params, loop=loop)
    finally:
        model.__dict__.pop("can_capture", None)
    pairs = [
        (one, two)
        for one, two in zip(ran.steps, ran.steps[1:], strict=False)
        if one.rows == two.rows == sizes.rows and not one.chunks and not two.chunks
    ]
    assert pairs, "no two steps in a row decoded every row"
    step_us = statistics.median((two.start_ns - one.start_ns) / 1e3 for one, two in pairs)
    inside = [two.start_ns <= one.copied_ns <= two.end_ns for one, two in pairs]
    return {
        "tokens_per_s": sum(len(one.tokens) for one in ran.told) / ran.seconds,
        "decode_tokens_per_s": sizes.rows / step_us * 1e6,
        "step_us": step_us,
        "forward_us": statistics.median((two.end_ns - two.start_ns) / 1e3 for _, two in pairs),
        "gap_us": statistics.median((two.start_ns - one.end_ns) / 1e3 for one, two in pairs),
        "copies_inside": sum(inside) / len(inside),
    }


def never(page_size: int, max_pages: int) -> bool:
    """For a model that is not to be captured."""
    return False


# --- all of it --------------------------------------------------------------------------------


def measure(sizes: Sizes) -> dict[str, Any]:
    """Runs every check; those that raise are named under `failed`."""
    began = time.perf_counter()
    found: dict[str, Any] = {"bench": "gpu_check", "torch": torch.__version__, "failed": []}
    large: list[Any] = []

    def large_model() -> Any:
        if not large:
            large.append(random_model(sizes.large, 0, "bfloat16", sizes.place))
        return large[0]

    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "device": lambda: check_device(sizes),
        "toy": lambda: check_toy(sizes),
        "attention": lambda: check_attention(sizes),
        "float32": lambda: check_float32(sizes),
        "speed": lambda: check_speed(sizes, large_model()),
        "bfloat16": lambda: check_bfloat16(sizes, large_model()),
    }
    for name, check in checks.items():
        at = time.perf_counter()
        try:
            found[name] = check()
        except Exception as error:  # the others may still tell something
            traceback.print_exc()
            found["failed"].append(name)
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["seconds"] = round(time.perf_counter() - at, 1)
        show(name, found[name])
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found


def show(name: str, values: dict[str, Any]) -> None:
    """One check's lines of the table."""
    for key, value in values.items():
        said = value
        if isinstance(value, dict):
            said = "  ".join(f"{part} {number:,}" for part, number in value.items())
        print(f"{name:10} {key:28} {said}", flush=True)


def main() -> int:
    """0 if every check passed, 1 if one did not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="What a GPU says.")
    parser.add_argument("--quick", action="store_true", help="fewer workloads and repeats")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print(
            "gpu_check needs a GPU, and torch.cuda.is_available() is false: run it where "
            f"`nvidia-smi` lists one and torch (here {torch.__version__}) is built for CUDA",
            file=sys.stderr,
        )
        return 2
    sizes = Sizes()
    if quick:
        sizes = replace(sizes, toy_seeds=1, repeats=1, tokens=48)
    found = {"gpu": torch.cuda.get_device_name(0), **measure(sizes)}
    print(json.dumps(found))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
