"""Stages: whose turn it is, what they hand to each other, the cut, and their ends."""

from __future__ import annotations

from mutating import Mutation

_PAPER = "tests/pure/test_pipeline.py::"
_HOSTILE = "tests/cpu/test_pipeline_hostile.py::"
_MODEL = "tests/cpu/test_pipeline_model.py::"
_PROCESS = "tests/cpu/test_pipeline_process.py::"
_ROUND = _PAPER + "test_a_steady_round_takes_each_row_once_and_is_sent_once"
_HEARS = _HOSTILE + "test_over_stages_every_client_hears_the_same_on_the_hostile_device[0]"

MUTATIONS = [
    Mutation(
        "a row is planned a step before its token is through",
        "an input that the last stage has not sampled yet",
        "scheduler/turns.py",
        "            ready |= step - self._sampled[slots] >= self._lag\n",
        "            ready |= step - self._sampled[slots] >= self._lag - 1\n",
        _PAPER + "test_every_client_hears_the_same_over_any_stages_at_any_depth[0]",
        "still on its way through the stages",
    ),
    Mutation(
        "a plan takes all rows that may decode",
        "stages that idle in turn",
        "scheduler/turns.py",
        "        share = -(-self._count // self._turns)\n",
        "        share = self._count\n",
        _ROUND,
    ),
    Mutation(
        "each plan chooses its rows anew",
        "rows that are sent and staged at every step",
        "scheduler/turns.py",
        "        if self.steady:\n            return self._round[0]\n",
        "",
        _ROUND,
    ),
    Mutation(
        "a round goes on when rows have come or gone",
        "a plan with rows that have ended",
        "scheduler/turns.py",
        "            self._life.changed = False\n            self._break_round()\n",
        "            self._life.changed = False\n",
        _PAPER + "test_every_client_hears_the_same_over_any_stages_at_any_depth[0]",
    ),
    Mutation(
        "rows that take turns do not stand",
        "columns that move with every step of a round",
        "scheduler/table.py",
        "        elif (turn := self._turn_of(rows)) is not None:\n",
        "        elif (turn := None) is not None:\n",
        _PAPER + "test_in_a_steady_round_nothing_moves_in_the_columns",
    ),
    Mutation(
        "a round ends with its steps outside the columns",
        "tokens that nobody has",
        "scheduler/table.py",
        "        self.fold()\n        self._turns = tuple",
        "        self._turns = tuple",
        _PAPER + "test_every_client_hears_the_same_over_any_stages_at_any_depth[0]",
    ),
    Mutation(
        "those who lack pages keep the others from their turn",
        "an engine that stands still",
        "scheduler/rows.py",
        "        if rows.count or not self._rows.count:\n",
        "        if True:\n",
        _PAPER + "test_short_of_pages_for_those_whose_turn_it_is_the_others_go_on",
    ),
    Mutation(
        "a token on its way through the stages is no reason",
        "a wait that has no name",
        "scheduler/scheduler.py",
        "            return SyncReason.PIPELINE\n",
        "            pass\n",
        _PAPER + "test_fewer_rows_than_stages_wait_for_their_tokens_and_are_counted",
    ),
    Mutation(
        "prompts wait for the tokens of others",
        "stages that idle before a prompt",
        "scheduler/scheduler.py",
        "self._turns.waiting(self._step) and not self._has_prompts():",
        "self._turns.waiting(self._step):",
        _PAPER + "test_a_prompt_is_not_held_up_by_tokens_on_their_way",
    ),
    Mutation(
        "a plan is compared with the one before it",
        "rows that are sent at every step",
        "scheduler/scheduler.py",
        "same = rows is self._sent_rows[0]\n",
        "same = rows is self._sent_rows[-1]\n",
        _ROUND,
    ),
    Mutation(
        "hidden states are taken before they are left",
        "a stage that computes on another step's states",
        "runner/hand_over.py",
        "            link.wait(step, self._device)\n",
        "",
        _HEARS,
        "race on '/states of stage 0",
    ),
    Mutation(
        "tokens are taken before they are left",
        "an input token of another step",
        "runner/hand_over.py",
        "        link.wait(due.step, self._device)\n",
        "",
        _HEARS,
        "race on '/tokens for stage 0",
    ),
    Mutation(
        "tokens come back a step late",
        "a row that decodes a token of the round before",
        "runner/hand_over.py",
        "due = self._due.popleft() if len(self._due) == self._stages else None\n",
        "due = self._due.popleft() if len(self._due) > self._stages else None\n",
        _HEARS,
    ),
    Mutation(
        "a token is looked for among those still on their way",
        "a row that decodes another's token",
        "runner/relay/row.py",
        "np.cumsum([*self._sizes][lag - 1 :])",
        "np.cumsum([*self._sizes])",
        "tests/cpu/test_relay_row.py::"
        "test_over_stages_a_row_is_found_by_its_age_among_the_tokens_that_are_back",
    ),
    Mutation(
        "a slot's new owner dies of the old one's stop token",
        "a request whose KV is not written",
        "runner/hand_over.py",
        "            sampled.lost |= np.isin(sampled.slots, joined)\n",
        "            pass\n",
        _HEARS,
    ),
    Mutation(
        "what a step was staged in goes before its tokens come back",
        "memory handed out while it is read",
        "runner/runner.py",
        "            self._keep.also(due.blocks, due)\n",
        "            pass\n",
        _HEARS,
        "frees what is being read by stream forward of stage 0",
    ),
    Mutation(
        "dead rows are not told to the other stages",
        "KV that nobody wants, written by all stages but the last",
        "runner/hand_over.py",
        "            self._slots.bury(due.slots_dev, dead)\n",
        "            pass\n",
        _HOSTILE + "test_over_stages_a_dead_row_writes_nothing_on_any_stage",
    ),
    Mutation(
        "a layer keeps its number in a pool of few",
        "keys and values of another layer, or of none",
        "parallel/pipeline.py",
        "            layer.attention.layer = place",
        "            layer.attention.layer = number",
        _MODEL + "test_the_parts_of_a_model_are_the_model_to_the_last_bit",
    ),
    Mutation(
        "each stage loads the embedding",
        "memory for weights that no layer of the stage uses",
        "parallel/pipeline.py",
        '        model.add_module("embed", nn.Identity())\n',
        "        pass\n",
        _MODEL + "test_a_stage_has_the_weights_and_the_memory_of_its_layers_only",
    ),
    Mutation(
        "the host hears of the last stage's end only",
        "a host that waits for a stage that is stuck",
        "executor/process.py",
        "        if self._on_end is not None and (tell := self._on_end()) is not None:\n",
        "        if False and (tell := self._on_end()) is not None:\n",
        _PROCESS + "test_a_stage_killed_from_outside_while_another_is_stuck_is_named",
    ),
    Mutation(
        "the stage that hears of a failure is blamed for it",
        "an error that names the wrong stage",
        "executor/inline.py",
        "        known = isinstance(error, StepFailed)  # a stage before this one has failed\n",
        "        known = False\n",
        _PROCESS + "test_a_step_that_a_stage_fails_ends_everyone_and_names_it",
    ),
]
