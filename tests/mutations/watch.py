"""What an engine shows: times of requests, metrics, and who may read them."""

from __future__ import annotations

from mutating import Mutation

REQUESTS = "tests/pure/test_observe_requests.py"
APP = "tests/pure/test_watch_app.py"
LOOPBACK = "tests/pure/test_watch_loopback.py"

MUTATIONS = [
    Mutation(
        "who has stopped waiting is answered all the same",
        "questions that pile up behind a long step and make the next one longer",
        "observe/observer.py",
        "                    self._asks.remove(ask)",
        "                    pass",
        "tests/pure/test_watch_app.py::"
        "test_a_long_step_is_told_in_bounded_time_and_health_does_not_wait",
    ),
    Mutation(
        "a row that was left out forgets its last token",
        "a gap that was too short, or none, where a row had to wait",
        "observe/requests.py",
        "            self._left_ns[rid] = before_ns\n",
        "            pass\n",
        f"{REQUESTS}::test_a_row_that_missed_a_step_waited_for_both",
    ),
    Mutation(
        "all rows of a changed step have the gap of those that stayed",
        "latencies that hide who was left out",
        "observe/requests.py",
        "                self._gaps.add(now_ns - left_ns)\n",
        "                self._gaps.add(now_ns - before_ns)\n",
        f"{REQUESTS}::test_every_time_is_what_a_recorder_of_each_token_finds",
    ),
    Mutation(
        "who has ended is still heard of",
        "memory that grows with every request",
        "observe/requests.py",
        "        self._heard.discard(rid)\n        self._left_ns.pop(rid, None)\n",
        "",
        f"{REQUESTS}::test_who_has_ended_leaves_nothing_behind",
    ),
    Mutation(
        "a request's queue time starts again with each admission",
        "preempted requests that count twice",
        "observe/requests.py",
        "        if found is None or found.admitted_ns >= 0:\n",
        "        if found is None:\n",
        f"{REQUESTS}::test_every_time_is_what_a_recorder_of_each_token_finds",
    ),
    Mutation(
        "a value on a bound goes into the next bucket",
        "histograms that are off by what lies on their bounds",
        "observe/latency.py",
        "np.searchsorted(self._bounds, values)",
        'np.searchsorted(self._bounds, values, "right")',
        f"{REQUESTS}::test_buckets_are_cumulative_and_exact_at_each_bound",
    ),
    Mutation(
        "counters tell what may still change",
        "a counter that goes back, which Prometheus takes for a restart",
        "observe/reading.py",
        "        observer.books.known(at_rest=not watched.flights),\n",
        "        observer.books.summary(),\n",
        "tests/pure/test_metrics.py::test_counters_never_go_back",
    ),
    Mutation(
        "whatever name a request was sent to is answered",
        "a page on the web that reads an engine through a name that points here",
        "watch/loopback.py",
        '        if scope["type"] == "http" and not _is_local(scope["headers"], self._names):\n',
        "        if False:\n",
        f"{LOOPBACK}::test_only_requests_to_this_machines_own_names_are_answered",
    ),
    Mutation(
        "a busy engine is waited for without an end",
        "a monitor that hangs with what it monitors",
        "watch/app.py",
        "        return self._watched.observer.ask(question, self._patience_s)\n",
        "        return self._watched.observer.ask(question)\n",
        f"{APP}::test_a_long_step_is_told_in_bounded_time_and_health_does_not_wait",
    ),
    Mutation(
        "the server's end waits for what is being answered",
        "an engine that can't be closed while somebody watches it",
        "watch/loopback.py",
        "        self._server.force_exit = True",
        "        pass",
        f"{APP}::test_what_is_shown_ends_in_bounded_time_while_somebody_waits_for_an_answer",
    ),
    Mutation(
        "the process's own loggers are set up anew",
        "a program that serves something itself and loses its access log",
        "watch/loopback.py",
        "    def configure_logging(self) -> None:\n",
        "    def unused(self) -> None:\n",
        f"{LOOPBACK}::test_signals_and_loggers_stay_as_they_are_and_no_thread_stays",
    ),
    Mutation(
        "an end before the first token has all parts",
        "a span of a decode that never was",
        "watch/spans.py",
        "            if start_ns < 0:\n                return  # it never came so far\n",
        "",
        "tests/pure/test_request_spans.py::test_an_end_before_the_first_token_has_only_what_it_came_to",
    ),
]
