"""As much of vLLM as benchmarks/peer_engines.py calls: each token is followed by a fixed other one.

A prompt takes a step of its own, in which those before it go on.  In bfloat16 it fails.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

VOCAB = 500


def follows(token: int) -> int:
    return (token * 5 + 3) % VOCAB


class SamplingParams(SimpleNamespace):
    pass


class _Engine:
    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._running: list[Any] = []

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.ignore_eos
        assert params.temperature == 0.0
        last = prompt["prompt_token_ids"][-1]
        answer = SimpleNamespace(token_ids=[])
        output = SimpleNamespace(request_id=request_id, outputs=[answer])
        self._waiting.append((output, answer.token_ids, last, params.max_tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Any]:
        self._running += [self._waiting.pop(0)] if self._waiting else []
        for _, ids, last, _ in self._running:
            ids.append(follows(ids[-1] if ids else last))
        told = [output for output, *_ in self._running]
        self._running = [one for one in self._running if len(one[1]) < one[3]]
        return told


class LLM:
    def __init__(self, **options: Any) -> None:
        assert options["skip_tokenizer_init"]
        assert not options["enable_prefix_caching"]
        if options["dtype"] == "bfloat16":
            raise RuntimeError("this machine has no bfloat16")
        self.llm_engine = _Engine()

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert (params.prompt_logprobs, use_tqdm) == (2, False)
        return [self._scored(prompt["prompt_token_ids"]) for prompt in prompts]

    def _scored(self, ids: list[int]) -> Any:
        def alternatives(before: int, token: int) -> dict[int, Any]:
            best = follows(before)
            values = {best: -0.5, (best + 1) % VOCAB: -1.0}
            return {
                one: SimpleNamespace(logprob=value)
                for one, value in ({token: -7.0} | values).items()
            }

        logprobs = [None, *(alternatives(*pair) for pair in pairwise(ids))]
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=logprobs)
