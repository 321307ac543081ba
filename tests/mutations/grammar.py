"""What an answer may be, where its rows stand, and how its text is told apart."""

from __future__ import annotations

from mutating import Mutation

_MATCHERS = "tests/cpu/test_grammar_matchers.py::"
_TOOLS = "tests/cpu/test_grammar_tools.py::"
_GRAMMAR = "tests/pure/test_grammar.py::"
_PARSE = "tests/pure/test_parse.py::"

MUTATIONS = [
    Mutation(
        "the grammars' barrier may run twice",
        "a token that a grammar has taken twice",
        "runner/grammar.py",
        "        if step <= self._step:\n",
        "        if step < self._step:\n",
        _MATCHERS + "test_a_step_advances_once_however_often_its_barrier_is_called",
    ),
    Mutation(
        "a late token advances a slot's next grammar",
        "an answer that goes on where another stopped",
        "runner/grammar.py",
        "            if row.generation != generations[place]:\n",
        "            if False:\n",
        _MATCHERS + "test_a_row_of_an_owner_that_has_gone_advances_nobody",
    ),
    Mutation(
        "a late leave takes the next owner's grammar",
        "an answer that nothing holds any more",
        "runner/grammar.py",
        "        if row is not None and row.generation == generation:\n",
        "        if row is not None:\n",
        _MATCHERS + "test_a_row_of_an_owner_that_has_gone_advances_nobody",
    ),
    Mutation(
        "a grammar's dead end looks like its end",
        "half an answer that passes for a whole one",
        "runner/grammar.py",
        "                work, out.ctypes.data, self.words * 4, out.shape[0]\n            )\n"
        "            self._look_for_errors(slots)\n",
        "                work, out.ctypes.data, self.words * 4, out.shape[0]\n            )\n",
        _MATCHERS + "test_a_dead_end_is_an_error_of_its_row_and_no_end_of_an_answer",
    ),
    Mutation(
        "masks go to other rows",
        "a row held to another's grammar",
        "runner/grammar.py",
        "                work.append((row.matcher, place))\n",
        "                work.append((row.matcher, len(slots) - 1 - place))\n",
        _MATCHERS + "test_a_token_is_allowed_iff_its_bytes_keep_the_text_a_prefix_of_the_language",
    ),
    Mutation(
        "a grammar rolled back has still ended",
        "an answer cut at a draft that was rejected",
        "runner/grammar.py",
        "            row.matcher.rollback(count)\n"
        "            self.ended[slot] = row.matcher.is_stopped()\n",
        "            row.matcher.rollback(count)\n",
        _MATCHERS + "test_rejected_drafts_are_rolled_back_even_across_the_end",
    ),
    Mutation(
        "a draft that the grammar forbids is counted as good",
        "a draft that is verified and can't be taken",
        "runner/grammar.py",
        "                legal.append(row.matcher.validate_tokens(run) if run else 0)\n",
        "                legal.append(len(run))\n",
        _MATCHERS + "test_masks_along_drafts_are_those_of_walking_there_and_no_state_changes",
    ),
    Mutation(
        "a mask's bits are read from the other end",
        "tokens forbidden and allowed at random",
        "runner/grammar.py",
        'axis=1, bitorder="little")',
        'axis=1, bitorder="big")',
        _MATCHERS + "test_apply_masks_forbids_exactly_the_zeros",
    ),
    Mutation(
        "only the tokenizer's own cut of a text is allowed",
        "a mask that calls Python and leaves out tokens that are right",
        "grammar/lark.py",
        '    return f"{lark}\\n{_OPTIONS}"',
        "    return lark",
        _MATCHERS + "test_a_token_is_allowed_iff_its_bytes_keep_the_text_a_prefix_of_the_language",
    ),
    Mutation(
        "a schema may switch refusals off",
        "keywords accepted and not held",
        "grammar/schema.py",
        '    if "x-guidance" in schema:\n',
        "    if False:\n",
        _GRAMMAR + "test_what_can_not_be_held_is_refused_by_name",
    ),
    Mutation(
        "minProperties counts a key twice",
        "an object with fewer properties than was asked",
        "grammar/schema.py",
        "    if isinstance(least, int) and least > max(1, named):\n",
        "    if False:\n",
        _GRAMMAR + "test_what_can_not_be_held_is_refused_by_name",
    ),
    Mutation(
        "a grammar that nothing matches is accepted",
        "a request that fails after its prompt was computed",
        "grammar/compiler.py",
        '    return "no text can match it" if matcher.is_error() else ""\n',
        '    return ""\n',
        _GRAMMAR + "test_what_can_not_be_held_is_refused_by_name",
    ),
    Mutation(
        "grammars are compiled on an ordinary stack",
        "a request of a few kilobytes that ends the server",
        "grammar/deep.py",
        "_STACK_BYTES = 256 << 20",
        "_STACK_BYTES = 1 << 20",
        _GRAMMAR + "test_long_chains_of_rules_and_references_do_not_end_the_process",
    ),
    Mutation(
        "special tokens may be said as text",
        "a control token in the middle of an answer",
        "grammar/vocabulary.py",
        "        self.special_token_ids = vocabulary.special_ids\n",
        "        self.special_token_ids = vocabulary.eos_ids\n",
        _GRAMMAR + "test_tokens_have_our_bytes_in_a_real_vocabulary",
    ),
    Mutation(
        "logits beyond the vocabulary are tokens",
        "an answer with ids that stand for nothing",
        "grammar/vocabulary.py",
        'table + [b""] * (size - len(table))',
        'table + [b" "] * (size - len(table))',
        _GRAMMAR + "test_tokens_have_our_bytes_in_a_real_vocabulary",
    ),
    Mutation(
        "a tag in free text is no trigger",
        "a tool call whose arguments nothing holds",
        "grammar/tools.py",
        'rules["open[lazy]"]',
        'rules["open"]',
        _TOOLS + "test_what_each_tool_choice_lets_a_model_say",
    ),
    Mutation(
        "a value and the tag behind it are two terminals",
        "a value that can't be ended",
        "grammar/tools.py",
        '    rules[name] = f"({text}) {literal(VALUE_END)}"\n    return name\n',
        '    rules[name] = text\n    return f"{name} {literal(VALUE_END)}"\n',
        _TOOLS + "test_a_text_of_glm_has_the_lengths_and_values_of_its_schema",
    ),
    Mutation(
        "what may become a tag is told",
        "half a tag in an answer",
        "parse/tags.py",
        "            if text.endswith(tag[:size]):\n",
        "            if False:\n",
        _PARSE + "test_nothing_that_may_become_a_tag_is_told",
    ),
    Mutation(
        "any JSON is a tool call",
        "a structured answer taken for a call of nobody's tool",
        "parse/llama.py",
        "call.name not in self._names and",
        "False and",
        _PARSE + "test_llama_calls",
    ),
    Mutation(
        "line ends that close the reasoning are told at once",
        "reasoning that depends on how the text was cut",
        "parse/answer.py",
        '        bare = text.rstrip("\\n")\n',
        "        bare = text\n",
        _PARSE + "test_reasoning",
    ),
]
