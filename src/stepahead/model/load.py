"""A model from its path, in the runner's process: the factory that a RunnerSpec names."""

from __future__ import annotations

import logging

import torch

from stepahead.kernels.jit import compiled_before
from stepahead.kernels.team import Team
from stepahead.model.packed import AS_READ, Packing, Quantization
from stepahead.model.spec import read_spec
from stepahead.model.weights import AnyModel, DTypeName, load_model, load_sparse

_LOG = logging.getLogger("stepahead")


def load(
    path: str,
    dtype: DTypeName,
    device: str = "cpu",
    *,
    drafts: bool = False,
    quantization: Quantization = "none",
    invariant: bool = False,
    settle_threads: bool = False,
) -> AnyModel:
    """The model of a folder or a GGUF file, with its weights on `device`; ModelError if it can't
    be used.  `drafts`: with its MTP layer, where it has one; `quantization`, `invariant` and
    `settle_threads` as in `Packing`, for a model without `sparse`."""
    spec = read_spec(path)
    if spec.sparse is not None:
        return load_sparse(spec, dtype, device, drafts=drafts)
    packing = packing_for(dtype, device, quantization, invariant, settle_threads)
    return load_model(spec, dtype, device, packing=packing)


def packing_for(
    dtype: DTypeName,
    device: str,
    quantization: Quantization,
    invariant: bool,
    settle_threads: bool = False,
) -> Packing:
    """How matrices are laid out: for kernels, with as many threads as torch has, on a CPU, but for
    bfloat16 as it was read."""
    if device != "cpu" or (dtype != "float32" and quantization == "none"):
        return AS_READ
    if not compiled_before():
        _LOG.warning("stepahead: compiling kernels for this CPU, once; some 20 s of one core")
    return Packing(quantization, invariant, Team(torch.get_num_threads()), settle_threads)
