"""What the sampler does for whom, and who has ended."""

from __future__ import annotations

from mutating import Mutation

MUTATIONS = [
    Mutation(
        "noise does not know the position",
        "a seeded request that repeats itself",
        "runner/sampler.py",
        "row_keys(drawn.keys_dev, positions_dev)",
        "row_keys(drawn.keys_dev, positions_dev * 0)",
        "tests/cpu/test_closed_form.py::test_serial_gives_the_closed_form",
    ),
    Mutation(
        "noise does not know the choice",
        "n answers that are one",
        "runner/noise.py",
        "0x9E3779B97F4A7C15 * (choice + 1)",
        "0x9E3779B97F4A7C15",
        "tests/cpu/test_sampler.py::test_the_noise_is_the_documented_hash",
    ),
    Mutation(
        "noise by row of the batch",
        "a seeded request that depends on its neighbours",
        "runner/sampler.py",
        "row_keys(drawn.keys_dev, positions_dev)",
        "row_keys(drawn.keys_dev + torch.arange(len(positions_dev)), positions_dev)",
        "tests/cpu/test_sampler.py::test_a_token_does_not_depend_on_its_batch",
    ),
    Mutation(
        "penalties count what the host has seen",
        "a penalty that comes D steps late",
        "runner/sampler.py",
        "        counts.count(group.penalised.counts_dev, tokens[group.penalised.rows_dev])\n",
        "        pass\n",
        "tests/cpu/test_sampler.py::test_counts_follow_the_samples_without_the_host",
    ),
    Mutation(
        "penalty counts outlive their owner",
        "a request punished for another one's words",
        "runner/counts.py",
        "        self.prompt_dev[row] = False\n",
        "",
        "tests/cpu/test_sampler.py::test_counts_of_a_new_owner_start_anew_and_growing_keeps_the_others",
    ),
    Mutation(
        "a slot's bias outlives its owner",
        "one request's bias applied to another",
        "runner/wishes.py",
        "        self._bias.pop(slot, None)\n",
        "",
        "tests/cpu/test_sampler.py::test_a_new_owner_inherits_no_wish",
    ),
    Mutation(
        "the ban below min_tokens is dropped",
        "an answer shorter than was asked",
        "runner/wishes.py",
        "        if params.min_tokens and stops:\n",
        "        if False:\n",
        "tests/cpu/test_sampler.py::test_min_tokens_end_the_ban_at_their_position",
    ),
    Mutation(
        "a row dies before min_tokens",
        "a row that lives on and writes nothing",
        "runner/ends.py",
        "        hits = (tokens_dev[row] == token) & (positions_dev[row] >= since)\n",
        "        hits = tokens_dev[row] == token\n",
        "tests/cpu/test_runner_steps.py::test_who_has_ended",
    ),
    Mutation(
        "a row that ignores its end dies of it",
        "a row that lives on and writes nothing",
        "runner/wishes.py",
        "plain and not params.ignore_eos and len(",
        "plain and len(",
        "tests/cpu/test_runner_steps.py::test_a_row_that_the_host_alone_ends_goes_on_writing",
    ),
    Mutation(
        "ends are looked for where there are none",
        "operations in every step for nothing",
        "runner/wishes.py",
        " and len(self._eos_ids) > 0\n",
        "\n",
        "tests/cpu/test_sampler.py::test_where_no_token_ends_a_row_the_device_looks_for_none[eos_ids1-params1-False]",
    ),
    Mutation(
        "a slot's ends outlive its owner",
        "a row that dies of another's stop token",
        "runner/wishes.py",
        "        self._ends.pop(slot, None)\n",
        "",
        "tests/cpu/test_runner_steps.py::test_a_new_owner_dies_of_its_own_ends_only",
    ),
]
