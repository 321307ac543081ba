"""The books: causes, holds, the collector; and who tells them."""

from __future__ import annotations

from mutating import Mutation

_CAUSES = "tests/pure/test_observe_causes.py::"
_GARBAGE = "tests/pure/test_observe_garbage.py::"
_DEVICE = "tests/cpu/test_books_device.py::"

MUTATIONS = [
    Mutation(
        "whatever holds the runner up is the cause",
        "a slow host that blames its runner",
        "observe/causes.py",
        "(at_ns < end_ns[last]) & (handed | (stage == Stage.LAUNCH))",
        "(at_ns < end_ns[last])",
        _CAUSES + "test_what_the_runner_says_goes_before_all_else_once_the_step_is_on_its_way",
    ),
    Mutation(
        "time is not cut where a step is handed over",
        "idle time blamed on the wrong cause",
        "observe/causes.py",
        "(*lanes, _within_idle(posts, events), events.held[1:].ravel())",
        "(*lanes, events.held[1:].ravel())",
        _CAUSES + "test_every_nanosecond_has_the_stage_and_the_cause_that_counting_finds",
    ),
    Mutation(
        "a step of which nobody says when it was handed over was always on its way",
        "a host that is never late",
        "observe/causes.py",
        "    launch_ns[launch_ns == 0] = _NEVER\n",
        "",
        _CAUSES + "test_before_the_launch_the_host_is_the_cause",
    ),
    Mutation(
        "results on their way home are a plan that is late",
        "a slow hand-over that nobody sees",
        "observe/causes.py",
        "    Stage.WAIT: Cause.COPY,\n",
        "",
        _CAUSES + "test_before_the_launch_the_host_is_the_cause",
    ),
    Mutation(
        "a pause of the host on the way counts until the step has begun",
        "a slow runner that blames the host",
        "observe/causes.py",
        "np.where(at_ns < received_ns, _SENDING[stage], Cause.LAUNCH_LATE)",
        "_SENDING[stage]",
        _CAUSES + "test_on_its_way_a_launch_is_late_unless_the_host_was_held_up",
    ),
    Mutation(
        "a step is held before the one before has ended",
        "idle time booked twice, or to the wrong step",
        "observe/books.py",
        "            start_ns = max(one.start_ns, until_ns)\n",
        "            start_ns = one.start_ns\n",
        _CAUSES + "test_being_held_before_the_step_before_has_ended_is_no_business_of_a_step",
    ),
    Mutation(
        "what a fence has put off is a copy",
        "a coarse fence that nobody sees",
        "runner/arrival.py",
        "        put_off_ns = max(0, self.fence.at_ns() - self.fenced_ns) if self.fence else 0\n",
        "        put_off_ns = 0\n",
        _DEVICE + "test_a_coarse_fence_is_named_in_the_steps_that_bring_pages",
    ),
    Mutation(
        "the runner keeps its waits to itself",
        "a blocking copy that looks like a slow launch",
        "runner/runner.py",
        "            waits(waited),\n",
        "            (),\n",
        _DEVICE + "test_copies_that_block_are_named",
    ),
    Mutation(
        "decoding is waiting",
        "host work that no book holds",
        "executor/process.py",
        "            self._enter(_DECODE)\n",
        "",
        _DEVICE + "test_real_books_balance_and_every_stage_and_post_is_told",
    ),
    Mutation(
        "the books run on another clock than the device",
        "books that say nothing",
        "assemble.py",
        "    return executor, executor.now_ns\n",
        "    return executor, time.perf_counter_ns\n",
        _DEVICE + "test_an_engine_on_a_device_in_line_keeps_its_books_on_the_devices_clock",
    ),
    Mutation(
        "taking requests in is no stage",
        "host work that no book holds",
        "engine.py",
        "                self.books.enter(Stage.MAIL)\n",
        "",
        _CAUSES + "test_requests_taken_in_are_mail",
    ),
    Mutation(
        "Python collects whenever it likes",
        "a pause between a step's end and the next launch",
        "engine.py",
        "            gc.disable()  # or it may collect between a step's end and the next launch\n",
        "",
        _GARBAGE + "test_in_a_step_nothing_is_collected_by_itself_and_afterwards_all_is_as_it_was",
    ),
    Mutation(
        "collection is on after a step, whatever the program wanted",
        "a program's own settings undone",
        "engine.py",
        "            if garbage.automatic:\n                gc.enable()\n",
        "            gc.enable()\n",
        _GARBAGE + "test_collection_that_a_program_has_turned_off_stays_off_after_a_step",
    ),
    Mutation(
        "a host that never waits never collects",
        "memory that grows for ever",
        "observe/garbage.py",
        " or count > _PATIENCE * threshold\n",
        "\n",
        _GARBAGE + "test_what_has_been_due_for_long_waits_for_no_wait",
    ),
    Mutation(
        "pauses of an engine at rest count",
        "a program's own garbage on the engine's bill",
        "observe/garbage.py",
        "        if stage is not Stage.IDLE:",
        "        if True:",
        _GARBAGE + "test_an_engine_that_rests_is_not_held_up",
    ),
    Mutation(
        "a program that has frozen is thawed",
        "a program's own settings undone",
        "observe/garbage.py",
        "        if not gc.get_freeze_count():\n",
        "        if True:\n",
        _GARBAGE + "test_a_program_that_has_frozen_keeps_what_it_froze",
    ),
    Mutation(
        "a worker's pauses are its own secret",
        "a pause that looks like a slow launch",
        "executor/worker.py",
        "                result = replace(result, held=held + result.held)\n",
        "                pass\n",
        "tests/cpu/test_executor_worker.py::test_a_collection_is_told_with_the_next_step",
    ),
]
