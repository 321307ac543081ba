"""What the machine has: cores, and memory that is free.  Knows no options and no torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from stepahead.errors import ConfigError


def cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_memory(device: str) -> int:
    """Bytes free on the device for weights and pool; ConfigError where it can't be told."""
    return gpu_memory_available() if device == "cuda" else memory_available()


def gpu_memory_available() -> int:
    """Bytes free on the GPU that `device=cuda` will use: the first of CUDA_VISIBLE_DEVICES, or of
    the machine.  ConfigError where there is none.

    Asked of nvidia-smi, because torch would make a context on the GPU in this process.  CUDA and
    nvidia-smi may number unlike GPUs differently unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        raise ConfigError(
            "device=cuda, but CUDA_VISIBLE_DEVICES is empty and hides every GPU; name one there, "
            "or use device=cpu"
        )
    which = ["--id=" + visible.split(",")[0].strip()] if visible else []
    words = _ask_nvidia_smi([*which, "--query-gpu=memory.free", "--format=csv,noheader,nounits"])
    first = words.splitlines()[0].strip() if words.strip() else ""
    if first.startswith("["):  # [N/A]: a GPU that shares the machine's memory
        return memory_available()
    if not first.isdigit():
        raise ConfigError(
            f"device=cuda, but nvidia-smi tells of no GPU ({first[:80]!r} as free memory); check "
            "that `nvidia-smi` lists one, or use device=cpu"
        )
    return int(first) << 20


def _ask_nvidia_smi(arguments: list[str]) -> str:
    """What it prints; ConfigError where it is missing, fails or hangs."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "device=cuda, but there is no nvidia-smi on PATH to ask for the GPU's memory; install "
            "NVIDIA's driver, or use device=cpu"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"device=cuda, but nvidia-smi can't be asked for the GPU's memory ({error}); run it by "
            "hand, or use device=cpu"
        ) from error
    if answer.returncode != 0:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[0]
        raise ConfigError(
            f"device=cuda, but nvidia-smi finds no GPU to use; it said: {said[:200]}; check "
            "CUDA_VISIBLE_DEVICES and the driver, or use device=cpu"
        )
    return answer.stdout


def memory_available() -> int:
    """Bytes of memory that can be had without swapping, on the machine and in this container."""
    import psutil

    return min(int(psutil.virtual_memory().available), _container_memory())


def _container_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left below this control group's limit; a very large number where there is none."""
    try:
        limit, used = (root / name for name in ("memory.max", "memory.current"))
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no control groups, or the limit is the word "max"
        return 1 << 62
