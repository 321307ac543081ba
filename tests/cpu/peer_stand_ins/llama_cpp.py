"""As much of llama.cpp's C API as benchmarks/peer_engines.py calls: each token is followed by a
fixed other one, if every sequence's positions come without a gap.  Where HANGS is Q8_0, making that
takes forever."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB = 500
LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_1 = 0, 7, 3


def llama_backend_init() -> None:
    pass


def llama_model_quantize_default_params() -> Any:
    return SimpleNamespace(ftype=None, allow_requantize=False)


def llama_model_quantize(source: bytes, target: bytes, params: Any) -> int:
    if os.environ.get("HANGS") == "Q8_0" and params.ftype == LLAMA_FTYPE_MOSTLY_Q8_0:
        print("it hangs", file=sys.stderr, flush=True)
        time.sleep(600)
    if params.ftype == LLAMA_FTYPE_MOSTLY_Q4_1 or not params.allow_requantize:
        return 1
    shutil.copy(source.decode(), target.decode())
    return 0


def llama_model_default_params() -> Any:
    return SimpleNamespace()


def llama_model_load_from_file(path: bytes, params: Any) -> Any:
    return path.decode()


def llama_context_default_params() -> Any:
    return SimpleNamespace()


def llama_init_from_model(model: Any, params: Any) -> Any:
    return SimpleNamespace(params=params, lengths={}, logits=None)


def llama_model_get_vocab(model: Any) -> Any:
    return model


def llama_vocab_n_tokens(vocabulary: Any) -> int:
    return VOCAB


def llama_batch_init(tokens: int, embedding: int, sequences: int) -> Any:
    names = ("token", "pos", "n_seq_id", "logits")
    arrays: dict[str, Any] = {name: (ctypes.c_int32 * tokens)() for name in names}
    arrays["seq_id"] = [(ctypes.c_int32 * sequences)() for _ in range(tokens)]
    return SimpleNamespace(n_tokens=0, **arrays)


def llama_get_memory(context: Any) -> Any:
    return context


def llama_memory_clear(memory: Any, data: bool) -> None:
    memory.lengths.clear()


def llama_decode(context: Any, batch: Any) -> int:
    params, rows = context.params, []
    assert batch.n_tokens <= params.n_batch
    for at in range(batch.n_tokens):
        sequence, position = batch.seq_id[at][0], batch.pos[at]
        if position != context.lengths.get(sequence, 0) or sequence >= params.n_seq_max:
            return 1
        context.lengths[sequence] = position + 1
        if batch.logits[at]:
            row = np.zeros(VOCAB, np.float32)
            row[[(batch.token[at] * 5 + 3) % VOCAB, 0]] += (2.0, 1.0)
            rows.append(row)
    context.logits = np.stack(rows)
    return 0


def llama_get_logits(context: Any) -> Any:
    return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
