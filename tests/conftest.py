"""What each folder of tests needs: `pure` runs with torch barred, `gpu` only where there is one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no bug: how long an example takes is not judged, only what it gives.
settings.register_profile("house", settings(), deadline=None)
settings.load_profile("house")

# A shell starts what runs in the background deaf to Ctrl-C, and programs under test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent


def stands_in(item: pytest.Item, folder: str) -> bool:
    """Whether the test's file is somewhere under tests/`folder`."""
    return item.path.is_relative_to(TESTS / folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if stands_in(item, "gpu") or item.get_closest_marker("gpu")]
    if not on_gpu:
        return  # a run of tests/pure alone must not load torch
    import torch

    no_gpu = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    )
    for item in on_gpu:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _torch_barred_from_pure(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In one run with tests/cpu torch is loaded already, so a lazy `import torch` inside what a pure
    # test calls would pass unseen, and fail only on the machine without torch.
    if stands_in(request.node, "pure"):
        monkeypatch.setitem(sys.modules, "torch", None)
