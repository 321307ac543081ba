"""Reads requests: the prompt's tokens, what the answer must keep to, and how it is told apart.

All of it where the request is parsed, so nothing that can't be honoured is ever taken in.  Any
thread may ask.  Knows texts and grammars, no engine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepahead.errors import InvalidParameter, UnsupportedModel
from stepahead.grammar import (
    GrammarCompiler,
    ToolGrammar,
    Vocabulary,
    after_reasoning,
    tool_grammar,
)
from stepahead.llm.forms import Form, reasoning_begun, shown_ids, special_texts
from stepahead.llm.prompts import Prompt, read_chat
from stepahead.llm.tools import ToolWish
from stepahead.parse.answer import THINK
from stepahead.parse.formats import AUTO, thinks_of, tool_format_of
from stepahead.structured import Grammar
from stepahead.text.texts import Texts
from stepahead.types import SamplingParams

_OWN = "structured_outputs"
_NO_FORMAT = (
    "the model's chat template teaches no format of tool calls that is known here; start a server "
    "with --tool-call-parser if you know that the model writes one of them, or leave tools out"
)


class Reader:
    """Of one model's requests.  What grammars need is made with the first of them."""

    def __init__(
        self,
        texts: Texts,
        vocab_size: int,
        eos_ids: Sequence[int],
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """`vocab_size` and `eos_ids` are the model's; the parsers are named as in parse.formats."""
        self.texts = texts
        self.vocab_size = vocab_size
        self.tool_format = tool_format_of(tool_parser, texts.chat_template)
        self.thinks = thinks_of(reasoning_parser, texts.chat_template)
        self._eos_ids = frozenset(eos_ids)

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        return special_texts(self.texts)

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(Vocabulary.of(self.texts, self.vocab_size, sorted(self._eos_ids)))

    def hold(self, prompt: Prompt, params: SamplingParams, param: str = _OWN) -> Prompt:
        """The prompt with the grammar that `params.structured_outputs` asks for.

        Raises InvalidParameter, for the field `param`, where it can't be honoured.
        """
        if params.structured_outputs is None:
            return prompt
        try:
            grammar = self._compiler.compile(params.structured_outputs, param)
        except UnsupportedModel as error:
            raise InvalidParameter(f"{param}: {error}", param) from error
        if prompt.form is not None and prompt.form.thinks:
            grammar = self._behind_reasoning(grammar, prompt.form, param)
        return replace(prompt, grammar=grammar, eos_ids=self._eos_ids)

    def read_chat(
        self,
        messages: Any,
        params: SamplingParams,
        tools: ToolWish | None = None,
        *,
        param: str = _OWN,
        parse: bool = True,
        untold: bool = False,
        **template_kwargs: Any,
    ) -> Prompt:
        """A conversation; structure and calls begin behind the reasoning, if there is any.

        `tools` of the template are those of `tools`.  Without `parse` the answer is not told apart;
        `untold`: calls may stay text where how the model writes them is not known.
        Raises InvalidParameter, as `hold` does; also where both a structure and calls are asked.
        """
        if tools is not None:
            if params.structured_outputs is not None:
                words = f"{param} and tools can't both be held; leave one out"
                raise InvalidParameter(f'{words}, or say "tool_choice": "none"', param)
            template_kwargs["tools"] = list(tools.given)
            if self.tool_format is None:
                if tools.held or not untold:
                    raise InvalidParameter(f"tools: {_NO_FORMAT}", "tools")
                tools = None
        prompt = read_chat(messages, self.texts, **template_kwargs)
        form = self._form(prompt, tools)
        found = self.hold(replace(prompt, form=form), params, param)
        if tools is not None:
            grammar = self._hold_calls(tools, form)
            found = replace(found, grammar=grammar, eos_ids=self._eos_ids)
        return found if parse else replace(found, form=None)

    def _form(self, prompt: Prompt, tools: ToolWish | None) -> Form | None:
        begun = reasoning_begun(self.texts, prompt.ids) if self.thinks else False
        thinks = begun is not False
        if tools is None and not thinks:
            return None
        shown = shown_ids(self._special, None if tools is None else self.tool_format)
        found = None if tools is None else tools.tools
        return Form(found, self.tool_format or "hermes", thinks, begun is True, shown)

    def _hold_calls(self, asked: ToolWish, form: Form | None) -> Grammar | None:
        assert form is not None, "tools without a form"
        wish = ToolGrammar(
            asked.tools, asked.choice, form.tool_format, asked.parallel, self._special
        )
        text = tool_grammar(wish)
        if text is None:
            return None
        try:
            grammar = self._compiler.check(text, "tools")
        except UnsupportedModel as error:
            raise InvalidParameter(f"tools: {error}", "tools") from error
        if not form.thinks:
            return grammar
        # free text would take a tag that is no token for its own
        must = asked.choice == "auto" and THINK not in self._special
        return self._behind_reasoning(grammar, form, "tools", optional=not must)

    def _behind_reasoning(
        self, grammar: Grammar, form: Form, param: str, optional: bool = True
    ) -> Grammar:
        text = after_reasoning(grammar, self._special, form.inside, optional)
        return self._compiler.check(text, param)
