"""Explanations: nothing is passed over, nothing refused, no rule and no reason out of place."""

from __future__ import annotations

from mutating import Mutation

MUTATIONS = [
    Mutation(
        "an unknown flag is passed over",
        "a flag that changes everything and is not told to be unread",
        "explain/words.py",
        "            words.given.append(Given(shlex.join([word, *taken]), None))\n",
        "            pass\n",
        "tests/pure/test_explain_rules.py::test_every_flag_has_its_place_and_none_is_passed_over",
    ),
    Mutation(
        "another engine's flag is refused without a word",
        "a start that fails for a flag whose counterpart is known",
        "cli/main.py",
        "_of_others(error) or str(error)",
        "str(error)",
        "tests/pure/test_serve_flags.py::test_what_is_refused_is_one_line",
    ),
    Mutation(
        "origins in JSON are taken for one origin",
        "a web page that may never ask, and nobody says why",
        "serve/options.py",
        '            if "[" in origin.partition("://")[0]:',
        "            if False:",
        "tests/pure/test_serve_flags.py::test_an_origin_in_json_is_refused",
    ),
    Mutation(
        "a server's flags get lost on the way to here",
        "a server without its key",
        "explain/translate.py",
        "(self.options | self.server)",
        "self.options",
        "tests/pure/test_explain_rules.py::test_what_a_server_was_told_is_translated_too",
    ),
    Mutation(
        "overlap demanded by name is switched off all the same",
        "a start that is said to go well and does not",
        "explain/rules.py",
        "        rule.asked or rule.effect if asked else rule.effect,\n",
        "        rule.effect,\n",
        "tests/pure/test_explain_rules.py::test_each_published_rule_speaks_where_it_holds",
    ),
    Mutation(
        "stages are taken for the older runner's",
        "overlap said to be off where it is on",
        "explain/vllm.py",
        "_old_runner(words) and _piped(words)",
        "_piped(words)",
        "tests/pure/test_explain_rules.py::test_a_rule_is_quiet_where_it_does_not_hold",
    ),
    Mutation(
        "a model that does not fit is not explained",
        "an error in place of an explanation",
        "explain/settings.py",
        "        except NotEnoughMemory as error:\n",
        "        except NotEnoughMemory as error:\n            raise\n",
        "tests/pure/test_explain_model.py::test_what_would_be_refused_is_said_and_all_else_explained",
    ),
    Mutation(
        "a choice keeps its reason to itself",
        "a count under a name that no choice explains",
        "explain/choices.py",
        "        (SyncReason.HOST_LENGTHS,),\n",
        "        (),\n",
        "tests/pure/test_explain_model.py::test_every_reason_stands_in_exactly_the_choices_that_can_show_it",
    ),
    Mutation(
        "GPUs share a compressed cache",
        "a conversation that does not fit where it is said to",
        "explain/glm.py",
        "        splits_cache=0,",
        "        splits_cache=64,",
        "tests/pure/test_explain_model.py::test_glm_needs_the_gpus_that_it_is_served_on",
    ),
    Mutation(
        "a folder's pool is told by fields that the engine does not read",
        "sizes of another model",
        "explain/glm.py",
        '        indexer_types=["full" if owns else "shared" for owns in sparse.indexers],\n',
        "",
        "tests/pure/test_explain_model.py"
        "::test_a_folder_of_its_kind_has_the_sizes_that_the_engine_reckons_with",
    ),
]
