"""The server: who is let in, what is told, and what is given back."""

from __future__ import annotations

from mutating import Mutation

_INSIDE = "tests/cpu/test_serve_inside.py::"
_FRONT = "tests/pure/test_serve_front.py::"
_FIELDS = "tests/pure/test_serve_requests.py::"
_LIFE = "tests/cpu/test_serve_lifecycle.py::"

MUTATIONS = [
    Mutation(
        "an unknown field of a request is passed over",
        "a wish that nobody heard, and an answer that looks as if",
        "serve/fields.py",
        "        if name not in known:\n            raise",
        "        if False:\n            raise",
        _FIELDS + "test_an_unknown_field_is_refused_by_name",
    ),
    Mutation(
        "1 is as good as true to a neutral field",
        "a value that asks for something, taken for one that does not",
        "serve/fields.py",
        " and isinstance(given, bool) == isinstance(neutral, bool)",
        "",
        _FIELDS + "test_a_neutral_number_is_no_truth",
    ),
    Mutation(
        "a full front lets one more in",
        "a queue that grows without end",
        "serve/front.py",
        "        if self.open_choices + choices > most:\n",
        "        if False:\n",
        _FRONT + "test_choices_are_counted_from_their_arrival_to_their_end",
    ),
    Mutation(
        "the engine lets anybody wait for pages",
        "a queue behind a full pool that nobody was told of",
        "serve/back.py",
        "wait=may_wait)",
        "wait=True)",
        _INSIDE + "test_a_pool_that_is_nearly_full_refuses_who_would_wait",
    ),
    Mutation(
        "a client that leaves keeps its row",
        "rows that compute for nobody",
        "serve/http.py",
        "            pass\n    gone()\n",
        "            pass\n",
        _INSIDE + "test_a_client_that_leaves_gives_its_row_back",
    ),
    Mutation(
        "a call cancelled before it was taken is forgotten",
        "a row that computes for a client that is gone",
        "serve/front.py",
        "        if call.cancelled or call.error is not None:\n            self._send(Cancel(",
        "        if False:\n            self._send(Cancel(",
        _FRONT + "test_a_call_that_is_cancelled_early_is_cancelled_when_it_is_taken",
    ),
    Mutation(
        "a prompt's refusal leaves its siblings running",
        "rows that compute for an answer that was refused",
        "serve/front.py",
        "        self.cancel(part.call)  # its other prompts\n",
        "",
        _FRONT + "test_a_refused_prompt_ends_its_call_and_takes_the_others_back",
    ),
    Mutation(
        "a deadline tells the client and not the engine",
        "rows that go on after 504",
        "serve/front.py",
        '"request_timeout"))\n            self.cancel(call)\n',
        '"request_timeout"))\n',
        _FRONT + "test_a_call_that_takes_too_long_ends_and_leaves_its_row",
    ),
    Mutation(
        "any key opens the server",
        "a server that is open to all and says it is not",
        "serve/http.py",
        "return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)",
        "return len(given) == 1",
        _INSIDE + "test_only_who_has_the_key_gets_in",
    ),
    Mutation(
        "a body without a length may be of any",
        "memory for whoever sends without an end",
        "serve/http.py",
        "        if size > most_bytes:\n",
        "        if False:\n",
        _INSIDE + "test_a_body_that_is_too_large_is_refused_however_it_comes",
    ),
    Mutation(
        "a silent stream is not pinged",
        "proxies that give a long prompt up",
        "serve/front.py",
        "                call.ping()\n",
        "                pass\n",
        _FRONT + "test_who_hears_nothing_for_long_is_pinged_and_others_are_not",
    ),
    Mutation(
        "a failed engine leaves its calls waiting",
        "streams without an end",
        "serve/front.py",
        "            call.fail(refusal)\n        self.calls.clear()",
        "            pass\n        self.calls.clear()",
        _FRONT + "test_an_engine_that_fails_ends_every_call",
    ),
    Mutation(
        "usage and its empty choices come without being asked for",
        "clients that look at a chunk's first choice",
        "serve/streams.py",
        "        if not self.asked.usage.include_usage:\n",
        "        if False:\n",
        _FRONT + "test_a_chat_stream_tells_the_role_first_and_the_reason_last",
    ),
    Mutation(
        "the frame behind another waits for the next one",
        "a request that is taken when somebody else comes",
        "executor/channel.py",
        "        if self._held:\n            return True",
        "        if False:\n            return True",
        "tests/cpu/test_executor_channel.py::test_a_frame_that_came_with_another_is_not_waited_for",
    ),
    Mutation(
        "a long text is read under Python's lock",
        "all clients waiting for one long prompt",
        "text/tokenizer.py",
        "            if len(text) < _LONG:\n",
        "            if True:\n",
        "tests/pure/test_text_folder.py::test_other_threads_run_while_a_long_text_is_read",
    ),
    Mutation(
        "a preempted request is not counted into the queue",
        "a queue whose pages nobody owes",
        "scheduler/lifetime.py",
        "        self.queue(entry)\n        self._mark(entry, Standing.PREEMPTED)\n",
        "        self._mark(entry, Standing.PREEMPTED)\n",
        "tests/pure/test_scheduler.py::test_a_preempted_request_counts_in_the_queue",
    ),
    Mutation(
        "a server that is told to end takes requests still",
        "an end that never comes",
        "serve/server.py",
        "        front.draining = True\n",
        "",
        _LIFE + "test_it_drains_when_it_is_told_to_end",
    ),
    Mutation(
        "an engine's death is told by nobody",
        "clients that wait for a process that is gone",
        "serve/link.py",
        "            if not self._stopping:\n                self._lost(self._end_in_words())\n",
        "",
        _LIFE + "test_a_process_that_dies_ends_streams_and_server[engine]",
    ),
]
