"""Cuts a plain model into stages: contiguous parts of its layers, each with what lies at its ends.

A pass over the model, before it has memory: what a stage has no part in is never loaded.  A part
has the interface of a model, but for what comes in and goes out: the first takes tokens, the others
the hidden states of the part before (`StepInputs.states_dev`), and only the last gives what
`logits` takes.  Knows no processes and not how the states travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepahead.model.batch import StepInputs
from stepahead.model.llama import Layer, Llama
from stepahead.model.load import packing_for
from stepahead.model.packed import Quantization
from stepahead.model.spec import read_spec
from stepahead.model.toy import LAYERS, ToyKV, ToyModel
from stepahead.model.weights import DTypeName, load_model


def layers_of(num_layers: int, stage: int, stages: int) -> range:
    """The layers of a stage; as even as can be, and what is left over goes to the first ones: the
    last stage has the head."""
    share, rest = divmod(num_layers, stages)
    first = stage * share + min(stage, rest)
    return range(first, first + share + (stage < rest))


# --- Llama and its kin ------------------------------------------------------------------------


class Layers(nn.Module):
    """Some layers of a model, by their numbers in the whole."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for place, (number, layer) in enumerate(layers.items()):
            assert isinstance(layer, Layer)
            layer.attention.layer = place  # in a pool that has these layers only
            self.add_module(str(number), layer)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)


def cut_llama(model: Llama, stage: int, stages: int) -> None:
    """Takes out of a model without memory what stage `stage` of `stages` has no part in."""
    mine = layers_of(model.spec.num_layers, stage, stages)
    model.add_module("layers", Layers({number: model.layers[number] for number in mine}))
    is_first, is_last = stage == 0, stage == stages - 1
    if not is_first and not (is_last and model.spec.tied_head):  # else it is the head, too
        model.add_module("embed", nn.Identity())
    if not is_last:
        model.add_module("norm", nn.Identity())
        model.add_module("head", nn.Identity())


class LlamaPart:
    """A stage of a Llama that has been cut."""

    fine_fence = True  # as the whole

    def __init__(self, model: Llama, stage: int, stages: int) -> None:
        self.vocab_size = model.vocab_size
        self.model = model
        self._is_first, self._is_last = stage == 0, stage == stages - 1

    def __call__(self, inputs: StepInputs, kv: Any) -> Tensor:
        """Hidden states [T, hidden] for the next part; of the last one, normed."""
        model = self.model
        x = model.embed(inputs.token_ids_dev) if self._is_first else inputs.states_dev
        assert x is not None, "the states of the part before did not come"
        run = model.finish if self._is_last else model.run
        return run(x, inputs, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[R, vocab]; of the last part only."""
        return self.model.logits(hidden)

    def new_kv(self, num_pages: int, page_size: int) -> Any:
        """A pool of this part's layers."""
        return self.model.new_kv(num_pages, page_size)


def load_part(
    path: str,
    dtype: DTypeName,
    stage: int,
    stages: int,
    *,
    quantization: Quantization = "none",
    invariant: bool = False,
    settle_threads: bool = False,
) -> LlamaPart:
    """A stage of the model of a folder or a GGUF file, with its weights and no others."""
    cut = partial(cut_llama, stage=stage, stages=stages)
    packing = packing_for(dtype, "cpu", quantization, invariant, settle_threads)
    return LlamaPart(load_model(read_spec(path), dtype, cut=cut, packing=packing), stage, stages)


# --- the toy ----------------------------------------------------------------------------------


class ToyPart:
    """A stage of the hash model: its states are int64[T, 2], the token's cell and what the layers
    so far have added up; the last part gives int64[T, 1], as the whole does."""

    fine_fence = True

    def __init__(self, vocab_size: int, max_len: int, stage: int, stages: int) -> None:
        self.vocab_size = vocab_size
        self._toy = ToyModel(vocab_size, max_len)
        mine = layers_of(LAYERS, stage, stages)
        bits = sum(0xFF << 8 * layer for layer in mine)
        self._mask = torch.tensor(bits - (bits >> 63 << 64))  # int64 has a sign
        self._is_first, self._is_last = stage == 0, stage == stages - 1

    def __call__(self, inputs: StepInputs, kv: ToyKV) -> Tensor:
        """Keeps this part's bits of the step's cells, and adds what they give."""
        if self._is_first:
            cells = self._toy.embed(inputs)
            sums = torch.zeros_like(cells)
        else:
            assert inputs.states_dev is not None
            cells, sums = inputs.states_dev.unbind(1)
        sums = sums + self._toy.run(cells & self._mask, inputs, kv)
        return sums.unsqueeze(1) if self._is_last else torch.stack([cells, sums], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """As the whole toy's; of the last part only."""
        return self._toy.logits(hidden)

    def new_kv(self, num_pages: int, page_size: int) -> ToyKV:
        """Memory for the KV cells."""
        return self._toy.new_kv(num_pages, page_size)
