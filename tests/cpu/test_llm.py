"""`LLM` as users meet it: right answers in order, bad input refused by name, failures told."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import closed_form
from offline_makers import TOY_OPTIONS, tiny_llama
from stepahead import LLM, RequestOutput, SamplingParams
from stepahead.cli.options import tell
from stepahead.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    InvalidParameter,
    ModelError,
    NotEnoughMemory,
    PromptTooLong,
    RequestError,
    RunnerDied,
    StepFailed,
    UnsupportedModel,
    WeightError,
)
from stepahead.llm.collect import Collector
from stepahead.llm.prompts import Prompt
from stepahead.model.toy import ToyModel
from text_makers import MESSAGES, TEMPLATE

TOY = closed_form.Toy(512, TOY_OPTIONS["max_model_len"])
SRC = Path(__file__).parents[2] / "src"


def toy(**options: Any) -> LLM:
    return LLM("toy", **(TOY_OPTIONS | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llama(folder: Path) -> Any:
    with LLM(folder, executor="inline", max_rows=4, threads=1, debug=True) as llm:
        yield llm


def at_rest(llm: LLM) -> None:
    assert not llm.engine.has_work
    llm.engine.scheduler.check_at_rest()


# --- answers --------------------------------------------------------------------------------

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(seed=5, max_tokens=30, stop=["ab", "dd"]),
    SamplingParams(seed=6, max_tokens=30, stop="ca", include_stop_str_in_output=True),
    SamplingParams(seed=7, max_tokens=40, stop_token_ids=list(range(60, 90))),
    SamplingParams(seed=8, max_tokens=5, n=3),
    SamplingParams(seed=9, max_tokens=6, logprobs=3, prompt_logprobs=2, temperature=0.7),
    SamplingParams(seed=10, max_tokens=None, top_k=5, logit_bias={1: 4.0}),
]


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(2, 512, 5 + 9 * i).tolist() for i in range(count)]


def said(ids: list[int]) -> str:
    pieces = closed_form.pieces(TOY.vocab_size)
    return b"".join(pieces[t] for t in ids if t not in TOY.specials).decode()


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_the_toys_answers_are_its_closed_forms(loop: str) -> None:
    asked = prompts(len(PARAMS))
    with toy(loop=loop) as llm:
        outputs = llm.generate(asked, PARAMS)
        at_rest(llm)
    for prompt, params, output in zip(asked, PARAMS, outputs, strict=True):
        assert output.prompt is None
        assert output.prompt_token_ids == prompt
        assert output.finished
        assert len(output.outputs) == params.n
        for choice in output.outputs:
            seed = 0 if params.seed is None else params.seed
            want = closed_form.complete(TOY, prompt, params, seed, choice.index)
            assert want.sure == len(want.tokens), "an unlucky seed: choose another"
            assert choice.token_ids == want.tokens
            assert choice.finish_reason == want.reason
            assert choice.stop_reason == want.stop_reason
            assert choice.text == text_of(want, params)
            assert choice.error == ""
    assert {c.finish_reason for o in outputs for c in o.outputs} == {"stop", "length"}
    assert {type(o.outputs[0].stop_reason) for o in outputs} == {str, int, type(None)}


def text_of(want: closed_form.Answer, params: SamplingParams) -> str:
    if isinstance(want.stop_reason, str):
        text = said(want.tokens)
        text = text[: len(text) - want.stop_end_bytes]
        keep = params.include_stop_str_in_output
        return text if keep else text[: len(text) - len(want.stop_reason)]
    return said(want.tokens[:-1] if want.reason == "stop" else want.tokens)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    prompt, params = prompts(6)[5], PARAMS[5]
    with toy() as llm:
        output = llm.generate([prompt], params)[0]
    want = closed_form.complete(TOY, prompt, params, 9)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    rows = [(choice.token_ids, choice.logprobs, want.logits, 3)]
    rows += [(prompt[1:], output.prompt_logprobs[1:], want.prompt_logits, 2)]
    for tokens, found, logits, width in rows:
        assert len(found) == len(tokens) == len(logits)
        for token, row, raw in zip(tokens, found, logits, strict=True):
            values = closed_form.log_softmax(raw)
            best = np.argsort(-values)[:width].tolist()
            assert list(row) == [token, *(t for t in best if t != token)]
            for other, entry in row.items():
                assert entry.logprob == pytest.approx(values[other], abs=1e-4)
                assert entry.rank == 1 + int((raw > raw[other]).sum())
                assert entry.decoded_token == said([other]) or other in TOY.specials
    total = sum(row[t].logprob for row, t in zip(choice.logprobs, choice.token_ids, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_every_loop_and_executor_gives_the_same_answers() -> None:
    asked = prompts(len(PARAMS))
    answers = [
        bare(toy_answers(asked, loop, executor))
        for loop in ("serial", "overlap")
        for executor in ("inline", "process")
    ]
    assert answers[1:] == answers[:1] * 3


def toy_answers(asked: list[list[int]], loop: str, executor: str) -> list[RequestOutput]:
    with toy(loop=loop, executor=executor) as llm:
        return llm.generate(asked, PARAMS)


def bare(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Without what depends on timing."""
    return [dataclasses.replace(o, metrics=None, num_cached_tokens=0) for o in outputs]


def test_prompts_come_in_many_shapes_and_answers_in_their_order(llama: LLM) -> None:
    text = "The quick brown fox"
    ids = llama.tokenizer.encode(text)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    shapes: list[Any] = [
        text,
        ids,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids), "prompt": text},
    ]
    outputs = llama.generate(shapes, greedy)
    assert [output.prompt for output in outputs] == [text, None, text, None, text]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [int(output.request_id) for output in outputs] == sorted(
        int(output.request_id) for output in outputs
    )
    for one in (text, ids, {"prompt": text}):
        assert bare(llama.generate(one, greedy))[0].outputs == outputs[0].outputs
    assert outputs[0].outputs[0].text == llama.tokenizer.decode(outputs[0].outputs[0].token_ids)
    assert llama.generate([]) == []


def test_chat_renders_the_models_template(llama: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    (output,) = llama.chat(MESSAGES, greedy)
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES)
    assert output.prompt == rendered + "<|im_start|>assistant\n"
    assert output.prompt_token_ids == llama.tokenizer.encode(output.prompt)
    again = llama.chat([MESSAGES, MESSAGES[1:]], [greedy, greedy])
    assert again[0].outputs == output.outputs
    assert again[1].prompt == output.prompt.partition("<|im_end|>\n")[2]
    (bare_end,) = llama.chat(MESSAGES, greedy, add_generation_prompt=False)
    assert bare_end.prompt == rendered


def test_a_template_of_ones_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ greeting }}: {{ messages[0].content }}", encoding="utf-8")
    with LLM(folder, chat_template=file, executor="inline", max_rows=1, threads=1) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": "fox"}],
            SamplingParams(max_tokens=1),
            chat_template_kwargs={"greeting": "Hail"},
        )
        assert output.prompt == "Hail: fox"
    text = TEMPLATE + "!"
    with LLM(folder, chat_template=text, executor="inline", max_rows=1, threads=1) as llm:
        assert (llm.chat(MESSAGES, SamplingParams(max_tokens=1))[0].prompt or "").endswith("!")


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llama: LLM) -> None:
    ids = llama.tokenizer.encode("The dog")
    free = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = llama.generate([ids], free)[0].outputs[0]
    last = plain.token_ids[3]
    count = plain.token_ids.index(last) + 1
    for keep in (False, True):
        params = SamplingParams(
            temperature=0.0, stop_token_ids=[last], include_stop_str_in_output=keep
        )
        choice = llama.generate([ids], params)[0].outputs[0]
        assert choice.token_ids == plain.token_ids[:count]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", last)
        assert choice.text == llama.tokenizer.decode(plain.token_ids[: count - (not keep)])


def test_the_prefix_cache_and_the_clock_are_told() -> None:
    prompt = list(range(2, 60))
    with toy() as llm:
        began_s = time.monotonic()
        first, again = (llm.generate([prompt], SamplingParams(max_tokens=3))[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 48  # the full pages of the prompt
    metrics = again.metrics
    assert metrics is not None
    assert metrics.first_token_s is not None
    assert began_s <= metrics.arrival_s <= metrics.first_token_s <= metrics.finished_s


def test_without_stderr_there_is_no_progress_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with toy() as llm:
        for shown in (None, True):
            assert llm.generate([[3]], SamplingParams(max_tokens=2), use_tqdm=shown)[0].finished
    tell("a line for people")
    assert capsys.readouterr().out == ""


def test_a_progress_bar_is_drawn_on_stderr_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with toy() as llm:
        llm.generate(prompts(3), SamplingParams(max_tokens=2))
        assert capsys.readouterr().err == ""
        llm.generate(prompts(3), SamplingParams(max_tokens=2), use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err
    assert "out tokens/s" in captured.err


# --- refused --------------------------------------------------------------------------------

NAN = float("nan")
BAD_PROMPTS: list[tuple[Any, type[RequestError], str, str]] = [
    ([], InvalidParameter, "prompt", "empty"),
    ("", InvalidParameter, "prompt", "empty"),
    ([3, 512], InvalidParameter, "prompt", "token id 512 is outside the vocabulary 0..511"),
    ([-1, 3], InvalidParameter, "prompt", "token id -1"),
    ([3, 2**70], InvalidParameter, "prompt", "whole token ids"),
    ([0.5], InvalidParameter, "prompt", "whole token ids"),
    (["a", "b"], InvalidParameter, "prompt", "whole token ids"),
    ([[3], [4]], InvalidParameter, "prompt", "prompt"),
    (None, InvalidParameter, "prompt", "NoneType"),
    (b"bytes", InvalidParameter, "prompt", "bytes"),
    ({"text": "x"}, InvalidParameter, "text", "'text'"),
    ({"prompt": 3}, InvalidParameter, "prompt", "must be text"),
    ({"prompt_token_ids": "abc"}, InvalidParameter, "prompt_token_ids", "must be token ids"),
    ({"prompt_token_ids": [3], "prompt": 5}, InvalidParameter, "prompt", "must be text"),
    ([5, True], InvalidParameter, "prompt", "true or false"),
    ([5, np.True_], InvalidParameter, "prompt", "true or false"),
    (np.ones((2, 3), int), InvalidParameter, "prompt", "not an array of shape (2, 3)"),
    ("words", InvalidParameter, "prompt", "toy model has no tokenizer"),
    ([3] * 256, PromptTooLong, "prompt", "256 tokens; the model takes 256"),
]


@pytest.mark.parametrize(("bad", "kind", "param", "words"), BAD_PROMPTS)
def test_a_bad_prompt_is_named_and_nothing_runs(
    bad: Any, kind: type[RequestError], param: str, words: str
) -> None:
    with toy() as llm:
        with pytest.raises(kind, match=r"^prompts\[1\]: ") as caught:
            llm.generate([[3, 4], bad, [5]], SamplingParams(max_tokens=2))
        assert words in str(caught.value)
        assert caught.value.param == param
        at_rest(llm)
        assert llm.engine.scheduler.life.counters.steps == 0
        assert len(llm.generate([[3, 4]], SamplingParams(max_tokens=2))[0].outputs[0].text) > 0


def test_a_prompt_longer_than_the_pool_is_refused() -> None:
    with toy(num_pages=4) as llm:
        with pytest.raises(PromptTooLong, match="the pool has 4") as caught:
            llm.generate([[3], [3] * 100], SamplingParams(max_tokens=2))
        assert caught.value.param == "prompt"
        with pytest.raises(PromptTooLong) as caught:
            llm.generate([[3] * 10], SamplingParams(max_tokens=100))
        assert caught.value.param == "max_tokens"
        at_rest(llm)
        assert llm.generate([[3] * 10], SamplingParams(max_tokens=50))[0].finished


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [3]}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logit_bias": {3: NAN}}, "logit_bias"),
    ({"logit_bias": {3: 1000}}, "logit_bias"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_PARAMS)
def test_a_bad_parameter_is_named_when_it_is_built(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter, match=param) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_an_unknown_parameter_is_no_parameter() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # pyrefly: ignore


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_ids_past_the_vocabulary_are_refused_before_anything_runs(field: str) -> None:
    params = SamplingParams(**{field: [600] if field == "stop_token_ids" else {600: 1.0}})
    with toy() as llm:
        with pytest.raises(InvalidParameter, match=rf"prompts\[1\]: {field} names token 600"):
            llm.generate([[3], [4]], [SamplingParams(), params])
        at_rest(llm)


def test_params_must_match_the_prompts() -> None:
    with toy() as llm:
        with pytest.raises(InvalidParameter, match="2 sampling_params for 3 prompts"):
            llm.generate([[3], [4], [5]], [SamplingParams()] * 2)
        with pytest.raises(InvalidParameter, match=r"sampling_params\[0\] is a dict"):
            llm.generate([[3]], [{"n": 1}])
        for given in (5, {"n": 1}):
            with pytest.raises(InvalidParameter, match="must be SamplingParams or a list of them"):
                llm.generate([[3]], given)
        with pytest.raises(InvalidParameter, match="prompts must be"):
            llm.generate(7)
        at_rest(llm)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"content": "no role"}],
        [{"role": "user", "content": 3}],
        [["not a message"]],
    ],
)
def test_bad_messages_are_named_and_nothing_runs(llama: LLM, messages: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"messages\[1\]: ") as caught:
        llama.chat([MESSAGES, messages])
    assert caught.value.param == "messages"
    at_rest(llama)


@pytest.mark.parametrize(
    "variables",
    [{"messages": []}, {"add_generation_prompt": False}, {"special_tokens": {}}, {3: 4}, 5, "ab"],
)
def test_variables_that_templates_get_otherwise_are_refused(llama: LLM, variables: Any) -> None:
    with pytest.raises(InvalidParameter, match="chat_template_kwargs m") as caught:
        llama.chat(MESSAGES, chat_template_kwargs=variables)
    assert caught.value.param == "chat_template_kwargs"


def test_variables_may_have_our_parameters_names(tmp_path: Path) -> None:
    template = "{{ template }}{{ texts }}{{ self_name }}"
    names = {"template": "fox", "texts": "dog", "self_name": "owl"}
    with LLM(tiny_llama(tmp_path), chat_template=template, executor="inline", threads=1) as llm:
        output = llm.chat(MESSAGES, SamplingParams(max_tokens=1), chat_template_kwargs=names)[0]
    assert output.prompt == "foxdogowl"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_row": 3}, "unknown option 'max_row'"),
        ({"loop": "fast"}, "choose one of serial, overlap"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"max_rows": 4096}, "at most 1024"),
        ({"max_num_seqs": 3}, "another spelling of 'max_rows'"),
        ({"page_size": 12}, "power of two"),
        ({"max_model_len": 10**6}, "the model knows 4096"),
        ({"num_pages": 4, "kv_memory_gb": 1.0}, "give one of them"),
        ({"kv_memory_gb": NAN}, "positive number"),
        ({"device": "hostile", "executor": "process"}, "executor=inline"),
        ({"chat_template": "/no/such/file"}, "can't be read"),
        ({"chat_template": 5}, "chat template '5' can't be read"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        toy(**options)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(NotEnoughMemory, match=r"needs .* GiB .* are free; lower"):
        toy(kv_memory_gb=100_000)
    with pytest.raises(NotEnoughMemory, match="the KV pool would hold"):
        toy(kv_memory_gb=1e-9)


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"/no/such/model"):
        LLM("/no/such/model")
    with pytest.raises(WeightError, match="xxx: no such file or folder"):
        LLM("x" * 5000)
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"notes\.txt"):
        LLM(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(tmp_path)
    cut = tmp_path / "cut"
    tiny_llama(cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    for executor in ("inline", "process"):
        with pytest.raises(WeightError, match=r"model\.safetensors"):
            LLM(cut, executor=executor, max_rows=2)
    (cut / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(cut)


def test_settings_have_a_line_each_and_reasons() -> None:
    with toy(max_step_tokens=4) as llm:
        lines = llm.settings
    assert "max_rows=8" in lines
    assert "num_pages=128: every row at full length" in lines
    assert "max_step_tokens=8: every row of max_rows must fit a step" in lines
    assert [line.partition("=")[0] for line in lines].count("max_step_tokens") == 1
    with toy(num_pages=7, loop="serial") as llm:
        assert "num_pages=7" in llm.settings
        assert "loop=serial" in llm.settings


# --- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["serial", "overlap"])
def test_a_model_that_raises_ends_all_and_says_so(
    monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    forward, calls = ToyModel.forward, iter(range(1000))

    def failing(self: ToyModel, *args: Any) -> Any:
        if next(calls) == 10:
            raise ZeroDivisionError("a bad day")
        return forward(self, *args)

    monkeypatch.setattr(ToyModel, "__call__", failing)
    params = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(max_tokens=50)]
    with toy(loop=loop) as llm:
        with pytest.raises(StepFailed, match="a bad day") as caught:
            llm.generate([[3, 4], [5, 6]], params)
        short, long = caught.value.outputs
        assert short.outputs[0].finish_reason == "length"
        assert len(short.outputs[0].token_ids) == 3
        assert long.outputs[0].finish_reason == "error"
        assert "a bad day" in long.outputs[0].error
        assert 3 < len(long.outputs[0].token_ids) < 11
        with pytest.raises(EngineClosed, match="the engine has failed"):
            llm.generate([[3]])


def test_a_worker_that_is_killed_ends_all_and_says_so() -> None:
    with toy(executor="process") as llm:
        (worker,) = psutil.Process().children()
        threading.Timer(0.3, worker.kill).start()
        with pytest.raises(RunnerDied, match="SIGKILL") as caught:
            ask_for_ever(llm)
        reasons = [output.outputs[0].finish_reason for output in caught.value.outputs]
        assert reasons == ["error", "error"]
    assert psutil.Process().children() == []


def ask_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([[3, 4], [5, 6]], SamplingParams(max_tokens=None, ignore_eos=True))


def test_ctrl_c_between_steps_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as llm:
        step, calls = llm.engine.step, iter(range(1000))

        def interrupted() -> Any:
            if next(calls) == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return step()

        monkeypatch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(4), SamplingParams(max_tokens=100, ignore_eos=True))
        at_rest(llm)
        assert llm.engine.scheduler.life.counters.aborts == 4
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate([[3]], SamplingParams(max_tokens=2))[0].finished


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as llm:

        def stuck() -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second one raises")

        monkeypatch.setattr(llm.engine, "step", stuck)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[3]])
        monkeypatch.undo()
        with pytest.raises(EngineClosed, match="closed"):  # inside a step: nothing can be known
            llm.generate([[3]])


def test_a_call_beside_another_is_refused_and_does_it_no_harm() -> None:
    """It came from a second thread or a signal's handler: between two steps it took the answers of
    the first call away, in the middle of one it closed the engine under it."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompts = [[5, 6], [7, 8, 9]]
    refused: list[str] = []

    def beside(llm: LLM) -> None:
        with pytest.raises(EngineError, match="at another call") as caught:
            llm.generate([3, 4], params)
        refused.append(type(caught.value).__name__)

    with toy(executor="inline") as llm:
        right = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        step, launch = llm.step, llm.engine._core.launch

        def between() -> Any:
            beside(llm)
            return step()

        def within() -> bool:
            beside(llm)
            return launch()

        llm.step, llm.engine._core.launch = between, within  # type: ignore[method-assign]
        found = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in found] == right
        assert set(refused) == {"EngineError"}
        llm.step, llm.engine._core.launch = step, launch  # type: ignore[method-assign]
        assert llm.generate(prompts, params)[1].outputs[0].token_ids == right[1]


def test_after_close_nothing_runs_and_close_is_idempotent() -> None:
    llm = toy()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed, match="closed"):
        llm.generate([[3]])


def test_an_llm_that_is_dropped_gives_its_worker_back() -> None:
    llm = toy(executor="process")
    (worker,) = psutil.Process().children()
    del llm
    psutil.wait_procs([worker], timeout=10)
    assert psutil.Process().children() == []


def test_a_script_that_forgets_to_close_ends_and_leaves_no_worker(tmp_path: Path) -> None:
    script = """
        import psutil
        from stepahead import LLM, SamplingParams
        llm = LLM("toy", max_rows=4, max_model_len=256, threads=1)
        print(psutil.Process().children()[0].pid)
        print(llm.generate([[3, 4]], SamplingParams(max_tokens=2))[0].outputs[0].finish_reason)
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pid, reason = done.stdout.split()
    assert reason == "length"
    assert not psutil.pid_exists(int(pid))


def test_the_host_of_a_worker_does_without_torch() -> None:
    script = (
        "import sys\n"
        "from stepahead import LLM, SamplingParams\n"
        "with LLM('toy', max_rows=4, max_model_len=256, threads=1) as llm:\n"
        "    llm.generate([[3, 4]], SamplingParams(max_tokens=2))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- streamed -------------------------------------------------------------------------------

REPEATING = [
    SamplingParams(temperature=0.0, max_tokens=12, logit_bias={65: 100.0}, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=30, logit_bias={65: 100.0}, stop="dccdccdcc"),
    SamplingParams(seed=5, max_tokens=30, logit_bias={65: 9.0, 66: 9.0}, stop_token_ids=[66]),
]


def deltas(llm: LLM) -> dict[int, list[Any]]:
    collector, prompt = Collector(llm.tokenizer), Prompt([5, 6, 7], None)
    for key, params in enumerate(REPEATING):
        collector.open(key, prompt, params, llm.engine.add(prompt.ids, params), streaming=True)
    told: dict[int, list[Any]] = {key: [] for key in range(len(REPEATING))}
    while llm.engine.has_work:
        if (outputs := llm.step()) is not None:
            for delta in collector.take(outputs).deltas:
                told[delta.key].append(delta)
    return told


def test_each_token_is_streamed_by_itself_under_drafts_too() -> None:
    with toy() as plain, toy(draft="ngram", draft_tokens=4) as drafting:
        assert deltas(drafting) == deltas(plain)
        assert sum(drafting.engine.scheduler.draft_counts().accepted_at) > 0
