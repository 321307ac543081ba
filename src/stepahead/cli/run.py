"""`stepahead run`: a file of prompts in, a file of answers out, and what is done stays done.

Knows lines and answers; keeps a window of requests in the engine, whatever the file's length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from stepahead.cli.jsonl import (
    PROMPTS,
    AnswerFile,
    Line,
    answered,
    count_lines,
    failed,
    read_lines,
)
from stepahead.cli.options import (
    ChatTemplate,
    EngineFlags,
    Quiet,
    SamplingFlags,
    given,
    open_model,
    tell,
)
from stepahead.cli.tables import Summary, show_probes, summary_table
from stepahead.errors import ConfigError, EngineError, InvalidParameter, RequestError
from stepahead.executor.stops import exit_code
from stepahead.llm.collect import Collector, News
from stepahead.llm.figures import RunTally
from stepahead.llm.interrupt import Interruption
from stepahead.llm.offline import LLM, count_news
from stepahead.llm.progress import Bar
from stepahead.llm.prompts import Prompt, read_prompt
from stepahead.llm.tools import read_tools
from stepahead.text.bad_words import with_bad_word_ids
from stepahead.types import SamplingParams, params_from

_MAX_TOKENS = 256
_TOOLS = ("tools", "tool_choice")  # fields of a line with messages
_WINDOW_ROWS = 4  # requests in the engine, in steps' worth of rows
_FED_AT_ONCE = 64  # lines tokenized between two steps: more would keep the device waiting


def run(
    model: str,
    /,
    *,
    input: Annotated[Path, Parameter(help="Lines of JSON with the prompts.")],
    output: Annotated[Path, Parameter(help="Where the answers go, a line each, as they end.")],
    chat_template: ChatTemplate = None,
    quiet: Quiet = False,
    sampling: SamplingFlags = None,
    engine: EngineFlags = None,
) -> int:
    """Answers a file of prompts.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, or `toy`.
    """
    if output.exists() and input.exists() and output.samefile(input):
        raise ConfigError(f"--input and --output are both {input}; name another output")
    defaults = {"max_tokens": _MAX_TOKENS, **given(sampling)}
    params_from(defaults)  # a bad default is told before the model is loaded
    total = count_lines(input)
    with (
        AnswerFile(output) as answers,
        open_model(model, engine, chat_template, quiet) as llm,
        Bar(total, False if quiet else None, len(answers.done)) as bar,
    ):
        batch = Batch(llm, answers, defaults, bar)
        mark, began_s = llm.engine.books.mark(), time.monotonic()
        batch.run(read_lines(input))
        wall_s, books = time.monotonic() - began_s, llm.engine.books.summary(mark)
        probes = llm.probes(mark.at_ns)
        summary = Summary(batch.tally, wall_s, books, llm.engine.syncs, probes)
    if not quiet:
        _show(batch, summary)
    return _tell_end(batch, llm.engine.failure)


class Batch:
    """Lines on their way through the engine."""

    def __init__(self, llm: LLM, answers: AnswerFile, defaults: dict[str, Any], bar: Bar) -> None:
        self.tally = RunTally()
        self.failed = 0
        self.skipped = 0
        self.cut_short = 0
        self.stopped_by = 0  # the signal that ended it early, if one did
        self.answers = answers
        self._llm = llm
        self._defaults = defaults
        self._bar = bar
        self._collector = Collector(llm.tokenizer)
        self._window = _WINDOW_ROWS * llm.resolved.config.max_rows
        self._lines: dict[int, Line] = {}  # asked and not answered, by number

    def run(self, lines: Iterator[Line]) -> None:
        """Asks all lines; returns early when interrupted or when the engine fails.

        When interrupted, what is in the engine is answered as far as it came: the flights in the
        air are dropped.
        """
        engine = self._llm.engine
        with Interruption(self._llm.close) as interruption:
            while not interruption.asked and engine.failure is None:
                self._feed(lines, interruption)
                if not engine.has_work:
                    break
                self._step()
            self.stopped_by = interruption.number
            if interruption.asked:
                self._llm.close()
            while engine.has_work:
                self._step()

    def _step(self) -> None:
        outputs = self._llm.step()
        if outputs is not None:
            news = self._collector.take(outputs)
            self._write(news)
            count_news(self._bar, news, outputs)

    def _feed(self, lines: Iterator[Line], interruption: Interruption) -> None:
        fed = 0
        while fed < _FED_AT_ONCE and len(self._collector) < self._window:
            line = interruption.wait_for(lambda: next(lines, None))  # of a pipe that may be silent
            if line is None:
                return
            if line.error is None and line.key in self.answers.done:
                self.skipped += 1
                continue
            fed += 1
            try:
                self._ask(line)
            except RequestError as error:
                self._fail(line, error)

    def _ask(self, line: Line) -> None:
        if line.error is not None:
            raise line.error
        try:
            prompt, params = self._read(line)
        except RequestError:
            raise
        except Exception as error:  # of what nobody thought: it is this line's, the rest goes on
            raise InvalidParameter(f"{type(error).__name__}: {error}", "line") from error
        rids = self._llm.engine.add(prompt.ids, params, grammar=prompt.grammar)
        self._lines[line.number] = line
        self._collector.open(line.number, prompt, params, rids)

    def _read(self, line: Line) -> tuple[Prompt, SamplingParams]:
        fields = dict(line.fields)
        asked = {name: fields.pop(name) for name in PROMPTS if name in fields}
        tools = [fields.pop(name, None) for name in _TOOLS] if "messages" in asked else []
        if fields.get("pooling") is not None:
            params = params_from(fields)  # the flags are about tokens, and it gets none
        else:
            if fields.get("seed") is None:  # null too: the engine's own would be of the order
                fields["seed"] = self._seed(line)
            params = params_from(self._defaults | fields)
            params = with_bad_word_ids(params, self._llm.tokenizer)
        reader = self._llm.reader
        if "messages" in asked:
            wish = read_tools(*tools)
            return reader.read_chat(asked["messages"], params, wish, untold=True), params
        return reader.hold(read_prompt(asked, self._llm.tokenizer), params), params

    def _seed(self, line: Line) -> int:
        # of the line alone, so that a run that was resumed answers as one that was not
        seed = self._llm.resolved.config.seed
        return (seed * 0x9E3779B97F4A7C15 + line.number) % (1 << 63)

    def _write(self, news: News) -> None:
        for number, output in news.done:
            line = self._lines.pop(number)
            errors = [choice.error for choice in output.outputs if choice.finish_reason == "error"]
            if errors:
                failure = self._llm.engine.failure
                self._fail(line, failure or EngineError(errors[0]))
            elif any(choice.finish_reason == "abort" for choice in output.outputs):
                self.cut_short += 1
                self.answers.write(answered(line, output))
            else:
                self.answers.write(answered(line, output))
                self.tally.add(output)

    def _fail(self, line: Line, error: Exception) -> None:
        self.failed += 1
        self.answers.write(failed(line, error))
        if not isinstance(error, EngineError):
            tell(f"line {line.number}: {error}")


def _show(batch: Batch, summary: Summary) -> None:
    title = f"{batch.tally.requests} answered, {batch.failed} failed"
    if batch.skipped:
        title += f", {batch.skipped} were there already"
    if batch.cut_short:
        title += f", {batch.cut_short} cut short"
    tell(title)
    console = Console(stderr=True)
    console.print(summary_table({"": summary}))
    show_probes(console, {"": summary.probes})


def _tell_end(batch: Batch, failure: EngineError | None) -> int:
    again = "run the same command again to do the rest"
    if batch.stopped_by:
        count = batch.tally.requests + batch.skipped
        cut = f" and {batch.cut_short} cut short" if batch.cut_short else ""
        tell(f"interrupted; {count} answers{cut} are in {batch.answers.path}; {again}")
        return exit_code(batch.stopped_by)
    if failure is not None:
        tell(f"error: {failure}; {again}")
    return 1 if batch.failed or failure is not None else 0
