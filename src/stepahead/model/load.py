"""A model from its path, in the runner's process: the factory that a RunnerSpec names."""

from __future__ import annotations

from stepahead.model.llama import Llama
from stepahead.model.spec import read_spec
from stepahead.model.weights import DTypeName, load_model


def load(path: str, dtype: DTypeName, device: str = "cpu") -> Llama:
    """The model of a folder or a GGUF file, with its weights on `device`; ModelError if it can't
    be used."""
    return load_model(read_spec(path), dtype, device)
