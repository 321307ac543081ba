"""Tokens and words that may not come, and a user's logits processor."""

from __future__ import annotations

from mutating import Mutation

_PROPERTY = "tests/cpu/test_hooks.py::test_bad_words_are_what_a_plain_matcher_finds"
_OWNERS = "tests/cpu/test_hooks.py::test_a_new_owner_is_rid_of_the_old_ones_bans_and_history"

MUTATIONS = [
    Mutation(
        "a preempted row's outputs are forgotten",
        "a word that comes because its beginning was said before a preemption",
        "runner/stage.py",
        "histories.append((place, block.add(join.tokens)))",
        "histories.append((place, block.add(join.tokens[: join.prompt_len])))",
        "tests/cpu/test_hooks.py::test_every_loop_keeps_to_bans_and_processor_as_serial_does[0]",
    ),
    Mutation(
        "a word is looked for one token late",
        "bad words that come whole",
        "runner/hooks.py",
        "torch.arange(1, len(before) + 1, device",
        "torch.arange(2, len(before) + 2, device",
        _PROPERTY,
    ),
    Mutation(
        "drafts are no history",
        "a word that comes because a draft began it",
        "runner/hooks.py",
        "            self.kept.write_drafts(positions_dev, before_dev)\n",
        "            pass\n",
        _PROPERTY,
    ),
    Mutation(
        "another slot's history is read",
        "a request that is denied a word for what another said",
        "runner/hooks.py",
        "part[0], part[1] = row, max(0, self._places[slot])",
        "part[0], part[1] = row, 0",
        _PROPERTY,
    ),
    Mutation(
        "what is sampled is not remembered",
        "words that come once their beginning was said",
        "runner/sampler.py",
        "        group.hooks.keep(positions_dev, tokens)\n",
        "        pass\n",
        "tests/cpu/test_hooks.py::test_serial_keeps_to_bans_and_processor_as_brute_force_does",
    ),
    Mutation(
        "the prompt's tokens forbid",
        "a word denied for what the client said",
        "runner/hooks.py",
        " & (where >= first)",
        "",
        _OWNERS,
    ),
    Mutation(
        "a slot's bans outlive its owner",
        "one request's words forbidden to another",
        "runner/hooks.py",
        "            table.pop(slot, None)\n",
        "            pass\n",
        _OWNERS,
    ),
    Mutation(
        "a processor may allow what is forbidden",
        "a word that comes because code of a user's set its logit",
        "runner/hooks.py",
        "own.masked_fill_(forbidden, -torch.inf)",
        "own",
        "tests/cpu/test_hooks.py::test_what_is_forbidden_stays_so_whatever_a_processor_does",
    ),
    Mutation(
        "a dead row writes behind the end of its history",
        "an engine that fails because a row ended",
        "runner/history.py",
        "positions_dev.clamp(max=self._length - 1)",
        "positions_dev",
        "tests/cpu/test_hooks.py::test_the_history_keeps_other_rows_when_it_grows_and_never_runs_over",
    ),
    Mutation(
        "a request that runs out of tokens is taken",
        "an answer of tokens that were forbidden",
        "engine.py",
        "left = not barred.issuperset(allowed)",
        "left = True",
        "tests/pure/test_engine_ends.py::test_a_request_that_could_be_left_without_a_token_is_refused[fields1]",
    ),
    Mutation(
        "tokens on the host stand still",
        "a processor that reads what was said before the last preemption",
        "runner/host_tokens.py",
        "self._tokens[slot] += tokens[end - count : end].tolist()",
        "pass",
        "tests/cpu/test_hooks.py::test_tokens_on_the_host_are_exact_in_every_loop_and_only_who_asks_waits",
    ),
    Mutation(
        "a row whose processor wants its tokens does not wait",
        "a processor that is called without them",
        "runner/late.py",
        "            if join.grammar is not None or asks:\n",
        "            if join.grammar is not None:\n",
        "tests/cpu/test_hooks.py::test_tokens_on_the_host_are_exact_in_every_loop_and_only_who_asks_waits",
    ),
]
