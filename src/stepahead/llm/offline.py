"""`LLM`: prompts in, whole answers out, in vLLM's shape.

Knows an engine and its texts; not what a plan says.  Not for several threads at once, but that any
may close it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from stepahead.assemble import Assembly, build_engine
from stepahead.config import Resolved, config_from
from stepahead.engine import Engine
from stepahead.errors import EngineClosed, EngineError, InvalidParameter, RequestError
from stepahead.llm.collect import Collector, News
from stepahead.llm.interrupt import Interruption
from stepahead.llm.progress import Bar
from stepahead.llm.prompts import (
    Prompt,
    prompt_list,
    read_prompt,
    read_template,
    template_variables,
)
from stepahead.llm.reader import Reader
from stepahead.llm.tools import read_tools
from stepahead.observe.probes import Probes, probes
from stepahead.text.bad_words import with_bad_word_ids
from stepahead.text.texts import Texts
from stepahead.types import Outputs, RequestOutput, SamplingParams
from stepahead.watch.beside import Beside

_LOG = logging.getLogger("stepahead")
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that answers prompts in batches.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    `model` is a Hugging Face folder, a .gguf file, or `toy`.  `options` are the fields of
    EngineConfig, other engines' spellings included (`max_num_seqs=64`).  `chat_template` is a file
    or a template's text that replaces the model's own.  Raises ConfigError, NotEnoughMemory or
    ModelError.  What was settled, and why, goes to the logger "stepahead".
    """

    def __init__(
        self, model: str | Path, *, chat_template: str | Path | None = None, **options: Any
    ) -> None:
        config = config_from(str(model), options)
        beside = Beside(config)  # a port that can't be had is told before the weights are read
        with contextlib.ExitStack() as failed:
            failed.callback(beside.close)
            assembly: Assembly = build_engine(config, read_template(chat_template))
            failed.callback(assembly.engine.close)
            beside.start(assembly.engine)
            failed.pop_all()
        assembly.engine.on_close(beside.close)
        self.observe_url: str | None = beside.url  # where the engine is shown, if it is
        self.engine: Engine = assembly.engine
        self.tokenizer: Texts = assembly.texts
        facts = assembly.resolved.facts
        self.reader = Reader(assembly.texts, facts.vocab_size, facts.eos_ids)
        self.settings: tuple[str, ...] = assembly.settings
        self._keys = itertools.count()
        self._answering = threading.Lock()
        # an LLM that nobody closes gives its worker back when it is dropped or the program ends
        self._finalizer = weakref.finalize(self, assembly.engine.close)
        for line in self.settings:
            _LOG.info("%s", line)

    @property
    def resolved(self) -> Resolved:
        """The effective configuration, and the reasons for it."""
        return self.engine.resolved

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and its worker, in a few seconds whatever they are at.  Idempotent; for
        any thread."""
        self._finalizer()

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, in their order.

        `prompts`: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, one or a list of
        them.  `sampling_params`: one for all, or one each.  `use_tqdm` draws a progress bar; None
        does so on a terminal.

        RequestError names the prompt that is wrong, and then none has run.  When the engine fails
        its EngineError is raised with `outputs`, the list that would have been returned, on it:
        requests that were not done have the finish reason `error` there.  So is EngineClosed when
        another thread closes the engine meanwhile; they have the finish reason `abort` then.  A
        call beside one that is not done is refused with EngineError, and does it no harm.
        """
        found = prompt_list(prompts)

        def read(prompt: Any, params: SamplingParams) -> Prompt:
            return self.reader.hold(read_prompt(prompt, self.tokenizer), params)

        return self._answer("prompts", found, read, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or a list of them, as `generate` does.

        `tools` and `tool_choice` are those of OpenAI's API.  With
        tools, and where the model reasons first, each output has its `message` with tool_calls and
        reasoning_content, which can be put into the conversation as it is; not where the template
        teaches calls that are written in another way than the known ones.
        `chat_template_kwargs` are further variables for the model's template.
        """
        one = isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping)
        found = [messages] if one else prompt_list(messages)
        variables = template_variables(chat_template_kwargs)
        wish = read_tools(tools, tool_choice, parallel_tool_calls)

        def read(conversation: Any, params: SamplingParams) -> Prompt:
            return self.reader.read_chat(
                conversation,
                params,
                wish,
                untold=True,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )

        return self._answer("messages", found, read, sampling_params, use_tqdm)

    def _answer(
        self,
        name: str,
        prompts: list[Any],
        read: Callable[[Any, SamplingParams], Prompt],
        sampling_params: Params,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        # before anything is touched: the steps of two calls would bring each other's answers
        with self._alone():
            return self._answer_alone(name, prompts, read, sampling_params, use_tqdm)

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        if not self._answering.acquire(blocking=False):
            raise EngineError(
                "this LLM is at another call, in another thread or below on this one's stack; that "
                "one goes on: give all prompts to one call, or each thread an LLM of its own"
            )
        try:
            yield
        finally:
            self._answering.release()

    def _answer_alone(
        self,
        name: str,
        prompts: list[Any],
        read: Callable[[Any, SamplingParams], Prompt],
        sampling_params: Params,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        params = _params_for(len(prompts), sampling_params)
        collector = Collector(self.tokenizer)
        keys = [str(next(self._keys)) for _ in prompts]
        done: dict[Any, RequestOutput] = {}
        with Interruption(self.close) as interruption:
            try:
                for place, prompt in enumerate(prompts):
                    with _naming(f"{name}[{place}]"):
                        asked = read(prompt, params[place])
                        own = with_bad_word_ids(params[place], self.tokenizer)
                        rids = self.engine.add(asked.ids, own, grammar=asked.grammar)
                    collector.open(keys[place], asked, params[place], rids)
                    if interruption.asked:
                        raise interruption.error
                with Bar(len(prompts), use_tqdm) as bar:
                    for news, outputs in self._steps(collector, interruption):
                        done.update(news.done)
                        count_news(bar, news, outputs)
            except BaseException:
                self.drain(collector.rids())
                raise
        outputs = [done[key] for key in keys]
        if self.engine.failure is not None:
            raise _with_outputs(self.engine.failure, outputs)
        if self.engine.closed and any(map(_was_cut_short, outputs)):
            words = "the engine was closed while it answered; what came is in `outputs`"
            raise _with_outputs(EngineClosed(words), outputs)
        return outputs

    def _steps(
        self, collector: Collector, interruption: Interruption
    ) -> Iterator[tuple[News, Outputs]]:
        while self.engine.has_work:
            outputs = self.step()
            if outputs is not None:
                yield collector.take(outputs), outputs
            if interruption.asked:
                raise interruption.error

    def step(self) -> Outputs | None:
        """One step of the engine; an interrupt or a fault inside it closes the engine."""
        try:
            return self.engine.step()
        except BaseException:
            self.close()
            raise

    def probes(self, since_ns: int | None = None) -> Probes:
        """Whether the host ran ahead of the device, in figures and in words: of the steps planned
        at `since_ns` (time.perf_counter_ns) or later, of all that are kept if None."""
        observer = self.engine.observer
        return probes(observer.ask(observer.snapshot), since_ns)

    def drain(self, rids: Sequence[int]) -> None:
        """Aborts requests and steps until nothing of them is left in the engine."""
        if self.engine.failure is not None or not self._finalizer.alive:
            return
        for rid in rids:
            self.engine.abort(rid)
        while self.engine.has_work:
            self.step()


def count_news(bar: Bar, news: News, outputs: Outputs) -> None:
    """Counts a step's outputs into the bar."""
    tokens_in = sum(len(output.prompt_token_ids) for _, output in news.done)
    bar.count(len(news.done), tokens_in, len(outputs.tokens))


@contextlib.contextmanager
def _naming(place: str) -> Generator[None]:
    """Puts the prompt's place before what is wrong with it."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{place}: {error}", error.param) from error


def _params_for(count: int, given: Params) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence):
        raise InvalidParameter(
            f"sampling_params must be SamplingParams or a list of them, not {type(given).__name__}",
            "sampling_params",
        )
    params = list(given)
    if len(params) != count:
        raise InvalidParameter(
            f"{len(params)} sampling_params for {count} prompts; give one for all or one each",
            "sampling_params",
        )
    for place, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise InvalidParameter(
                f"sampling_params[{place}] is a {type(item).__name__}, not SamplingParams",
                "sampling_params",
            )
    return params


def _was_cut_short(output: RequestOutput) -> bool:
    return any(choice.finish_reason == "abort" for choice in output.outputs)


def _with_outputs(error: EngineError, outputs: list[RequestOutput]) -> EngineError:
    error.outputs = outputs
    return error
