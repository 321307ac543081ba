"""Rows that wait for masks: what orders them, who they are, and what is told of them."""

from __future__ import annotations

from mutating import Mutation

_LATE = "tests/cpu/test_late.py::"
_PARITY = "tests/cpu/test_parity_grammar.py::test_every_loop_keeps_to_grammars_as_the_serial_one"
_RACES = _LATE + "test_late_rows_race_nobody"

MUTATIONS = [
    Mutation(
        "late sampling does not wait for its masks",
        "a row held to poison",
        "runner/runner.py",
        "        device.wait(Stream.FORWARD, device.record(Stream.SCHEDULE))\n        queued_ns",
        "        queued_ns",
        _RACES,
        "race on 'late staging",
    ),
    Mutation(
        "late results are copied out before they are there",
        "poison taken for a late token",
        "runner/runner.py",
        "        device.wait(Stream.COPY, end)\n        brought = self._copy_part(rows.part",
        "        brought = self._copy_part(rows.part",
        _RACES,
        "race on 'late results",
    ),
    Mutation(
        "the mask buffer is reused while its copy is pending",
        "a row held to the next step's mask",
        "runner/late.py",
        "drafts, heard), event)\n",
        "drafts, heard))\n",
        _RACES,
        "late",
    ),
    Mutation(
        "a forward does not wait for the late rows before it",
        "a step that runs on the token before last",
        "runner/runner.py",
        "        self._pending.finish()  # its rows' tokens are inputs of this step\n",
        "",
        _RACES,
    ),
    Mutation(
        "a grammar advances after the mask of the next token is made",
        "a token that was right a step ago",
        "runner/late.py",
        "        side.do(lambda: self._hear(step, rows, tokens, drafts, heard), event)\n",
        "        job = lambda: self._hear(step, rows, tokens, drafts, heard)\n"
        "        before = self.__dict__.pop('before', lambda: None)\n"
        "        self.__dict__['before'] = job\n"
        "        side.do(before, event)\n",
        _RACES,
    ),
    Mutation(
        "a mask goes to the row that had its place",
        "a row held to another's grammar after the rows have moved",
        "runner/stage.py",
        "        whose = owners[places]\n",
        "        whose = np.roll(owners[places], 1)\n",
        _RACES,
    ),
    Mutation(
        "a preempted answer begins its grammar anew",
        "a second beginning in the middle of an answer",
        "runner/late.py",
        "        known = join.tokens[join.prompt_len :].tolist()\n",
        "        known: list[int] = []\n",
        _PARITY,
    ),
    Mutation(
        "a part of a step retires all of it",
        "late tokens that nobody hears",
        "scheduler/scheduler.py",
        "            self._launched[0] = rest\n",
        "            self._launched.popleft()\n",
        _RACES,
    ),
    Mutation(
        "a grammar's end ends nobody",
        "an answer that goes on behind its end",
        "scheduler/scheduler.py",
        "            finishes += self._complete(launched, result)\n",
        "            pass\n",
        "tests/cpu/test_parity_grammar.py::test_serial_gives_the_closed_form_under_a_regex",
    ),
    Mutation(
        "drafts behind a grammar's end are output",
        "an answer longer than its grammar",
        "scheduler/drafts.py",
        "        counts[complete] = np.minimum(counts[complete], most)\n",
        "",
        _PARITY,
    ),
    Mutation(
        "drafts that a grammar forbids are verified",
        "drafts that can't be right, counted as wrong",
        "runner/sampling.py",
        "                box.asked = cut(made(box.asked), *legal_dev)\n",
        "                pass\n",
        _LATE + "test_drafts_that_a_grammar_forbids_are_none",
    ),
    Mutation(
        "the host waits for masks before it tells the others",
        "free rows held up by a grammar",
        "runner/flight.py",
        "        if not self._told and self._goes_first():\n",
        "        if False:\n",
        _LATE + "test_free_rows_are_told_while_the_masks_of_others_are_made",
    ),
    Mutation(
        "masks that come late are not counted",
        "a device that stands for a reason without a name",
        "runner/flight.py",
        "                syncs += (Sync(SyncReason.GRAMMAR, len(self.rows.rows) - waits),)\n",
        "                pass\n",
        _LATE + "test_masks_that_come_late_are_counted_for_their_rows_and_drawn",
    ),
    Mutation(
        "lengths are copied out before late rows are sampled",
        "a model that wants exact lengths fails at its first grammar",
        "runner/runner.py",
        "        late = staged.late is not None\n",
        "        late = False\n",
        _LATE + "test_a_model_that_wants_exact_lengths_keeps_to_grammars",
    ),
    Mutation(
        "masks are made before the tokens before them are heard",
        "a token that was right a step ago, on a device that has run when it is asked",
        "runner/late.py",
        "            side.do(heard.hear)  # before anybody comes, goes or wants a mask\n",
        "            pass\n",
        "tests/cpu/test_greedy.py::test_engines_choose_with_the_kernel_as_without",
    ),
    Mutation(
        "failures of rows that are gone are kept",
        "a text for each request that failed and was aborted, for good",
        "runner/late.py",
        "        self._unsaid.pop((slot, generation), None)\n",
        "",
        _LATE + "test_failures_that_nobody_asks_for_are_forgotten",
    ),
]
