"""What a start does not do: held by counting modules, maps and bytes."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import torch
from executor_fakes import answer
from gguf.constants import GGMLQuantizationType
from tiny_models import gguf_tensors, make_reference, random_blocks, smollm2_path, write_gguf

from stepahead import assemble
from stepahead.cache.pools import KVPool, LatentPool
from stepahead.config import config_from
from stepahead.errors import ModelError
from stepahead.executor.process import BUILDER, ProcessExecutor, StartedWorker
from stepahead.model.blocks import VALUES, block_reader
from stepahead.model.gguf import GGUFFile
from stepahead.model.spec import read_spec
from stepahead.model.weights import load_model
from stepahead.plan import NO_INTS, Plan
from stepahead.runner.spec import RunnerSpec

HANG_S = 60.0
BLOCKS = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)


def soon(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def maps_of(path: Path) -> int:
    """How often this process has mapped the file."""
    return Path("/proc/self/maps").read_text().count(str(path.resolve()))


# --- modules ------------------------------------------------------------------------------------


def imported_by(code: str, *arguments: str) -> set[str]:
    """Names of the modules that a fresh process has behind `code`."""
    told = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", told, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


def test_the_server_starts_without_what_it_may_never_need() -> None:
    code = (
        "from stepahead import LLM\nfrom stepahead.assemble import model_parts\n"
        "from stepahead.config import config_from\n"
        "import stepahead.executor.process\n"
        "model_parts(config_from(sys.argv[1], {})).texts.token_bytes"
    )
    unneeded = {"torch", "transformers", "rich", "cyclopts", "starlette", "jinja2", "llguidance"}
    assert not unneeded & imported_by(code, str(smollm2_path()))


def test_the_runner_starts_without_what_it_may_never_need() -> None:
    found = imported_by(
        "import stepahead.executor.worker, stepahead.runner.build\nimport stepahead.model.load"
    )
    assert "torch" in found
    unneeded = {"transformers", "rich", "cyclopts", "starlette", "jinja2", "llguidance"}
    unneeded |= {"tokenizers", "stepahead.device.hostile", "stepahead.device.cuda"}
    assert not (unneeded | {"stepahead.model.glm_moe_dsa", "torch._dynamo"}) & found


# --- the runner's process -----------------------------------------------------------------------


def test_a_worker_loads_torch_before_it_knows_what_to_run() -> None:
    modules = tuple(name.partition(":")[0] for name in (BUILDER, "stepahead.model.load:load"))
    worker = StartedWorker(modules)
    try:
        maps = Path(f"/proc/{worker.child.pid}/maps")
        assert soon(lambda: "libtorch_cpu" in maps.read_text())
    finally:
        worker.close()
    assert worker.child.code is not None


def test_a_module_that_is_not_there_is_the_builders_to_tell() -> None:
    spec = RunnerSpec("unused:unused", {"script": {}})
    worker = StartedWorker(("no.such.module", "stepahead.plan"))
    executor = ProcessExecutor(spec, HANG_S, "executor_fakes:build", worker=worker)
    try:
        assert executor.pid == worker.child.pid
        plan = Plan(1, NO_INTS, True)
        assert np.array_equal(executor.launch(plan).land().tokens, answer(plan))
    finally:
        executor.close()


def test_the_runners_process_is_there_before_the_models_files_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And ends with what is wrong with them."""
    before, seen = set(children()), set()

    def unreadable(*_: object) -> None:
        seen.update(set(children()) - before)
        raise ModelError("the file is damaged")

    monkeypatch.setattr(assemble, "model_parts", unreadable)
    with pytest.raises(ModelError, match="damaged"):
        assemble.build_engine(config_from("toy", {"threads": 1}))
    assert len(seen) == 1
    assert set(children()) <= before


def test_no_process_is_started_early_where_none_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(children())

    def unreadable(*_: object) -> None:
        assert set(children()) <= before
        raise ModelError("the file is damaged")

    monkeypatch.setattr(assemble, "model_parts", unreadable)
    for options in ({"executor": "inline"}, {"pipeline_stages": 2}):
        with pytest.raises(ModelError, match="damaged"):
            assemble.build_engine(config_from("toy", {"threads": 1} | options))


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_are_to_the_bit_what_the_gguf_package_makes_of_them(
    kind: GGMLQuantizationType,
) -> None:
    # any number of blocks: kernels take the first many at once, and the rest another way
    reader = block_reader(kind)
    assert reader is not None
    for count in (1, 7, 4099):
        blocks = random_blocks(kind, count, VALUES)
        found = torch.empty(count, VALUES)
        reader(torch.from_numpy(blocks.copy()), found)
        assert np.array_equal(found.numpy(), gguf.quants.dequantize(blocks, kind))


def test_a_file_of_common_blocks_is_mapped_once_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matrices never go through the gguf package: 16 rows at a time, that took 1.4 s."""
    reference = make_reference("llama", hidden_size=64, intermediate_size=96)
    tensors = gguf_tensors(reference)
    kinds = {
        name: BLOCKS[place % len(BLOCKS)]
        for place, (name, value) in enumerate(tensors.items())
        if value.ndim > 1
    }
    blocks = tensors | {
        name: random_blocks(kind, *tensors[name].shape) for name, kind in kinds.items()
    }
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, blocks, kinds)
    by_package, mapped = [], []
    slow = GGUFFile.dequantize

    def counted(self: GGUFFile, name: str, rows: np.ndarray) -> np.ndarray:
        by_package.append(name)
        mapped.append(maps_of(path))
        return slow(self, name, rows)

    monkeypatch.setattr(GGUFFile, "dequantize", counted)
    model = load_model(read_spec(path), "bfloat16")
    assert by_package
    assert not set(by_package) & kinds.keys()
    assert set(mapped) == {1}
    gc.collect()
    assert maps_of(path) == 0
    values = gguf.quants.dequantize(blocks["token_embd.weight"], kinds["token_embd.weight"])
    assert torch.equal(model.embed.weight, torch.from_numpy(values).bfloat16())


# --- pools --------------------------------------------------------------------------------------


def test_a_pool_is_resident_only_where_something_was_written() -> None:
    before = resident_bytes()
    pool = KVPool(4, 4096, 16, 8, 64, torch.float32)  # 1 GiB
    latent = LatentPool((True, False), 4096, 16, 512, 128, torch.bfloat16)
    assert resident_bytes() - before < 16 << 20
    cells = torch.arange(64 * 16)
    values = torch.ones(len(cells), 8, 64)
    pool.write(0, cells, values, values)
    latent.write_rows(0, cells, torch.ones(len(cells), 512, dtype=torch.bfloat16))
    assert resident_bytes() - before < 32 << 20
    assert bool(pool.k[0][:64].all())
    assert not pool.k[0][64:128].any()
    assert pool.k[0].data_ptr() % 64 == 0


# --- the benchmark ------------------------------------------------------------------------------


def test_the_benchmark_tells_seconds_and_memory_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    start = importlib.import_module("start")
    found = start.in_a_process("start", "toy", {})
    assert 0 < found["imported_s"] < found["built_s"] < found["first_token_s"]
    assert found["server_mb"] >= found["server_own_mb"] > 0
    assert found["runner_mb"] > found["server_mb"]  # torch is there and not here
    row = found | {"first_token_s_lowest": found["first_token_s"]}
    told = {"model": "toy", "rounds": 1, "starts": {"float32": row}, "parts_s": {"torch": 1.0}}
    starts, parts = start.tables(told)
    assert (starts.row_count, parts.row_count) == (1, 1)
