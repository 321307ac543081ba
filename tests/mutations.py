"""The guards of the engine, each with the mutation that takes it out and the test that must notice.

`scripts/mutants` runs them all; a few run in the ordinary suite.  docs/proof.md is this list as a
table.
"""

from __future__ import annotations

from mutating import Mutation

PAPER = "tests/pure/test_parity_paper.py::test_every_client_hears_the_same_at_any_depth"
TOY = "tests/cpu/test_parity_toy.py::test_every_client_hears_the_same[0]"
CLOSED = "tests/cpu/test_closed_form.py::test_serial_gives_the_closed_form"
TREE = "tests/pure/test_prefix.py::test_the_tree_is_its_model"
HOSTILE = "tests/cpu/test_hostile.py::"
ROW = "tests/cpu/test_relay_row.py::"
RUNS = "tests/cpu/test_runner.py::"
SAMPLER = "tests/cpu/test_sampler.py::"
SCHEDULER = "tests/pure/test_scheduler.py::"
WASTE = "tests/cpu/test_parity_waste.py::"

EDGES = [
    Mutation(
        "forward does not wait schedule",
        "inputs or updates not yet arrived",
        "runner/runner.py",
        "        device.wait(Stream.FORWARD, staged)\n",
        "",
        TOY,
    ),
    Mutation(
        "copy does not wait forward",
        "a result read before it exists",
        "runner/runner.py",
        "        device.wait(Stream.COPY, device.record(Stream.FORWARD))\n",
        "",
        TOY,
    ),
    Mutation(
        "an event that covers too little",
        "a step that runs before its last upload",
        "runner/runner.py",
        "        scores = self._prompt_scores(plan, step)\n"
        "        staged = device.record(Stream.SCHEDULE)\n",
        "        staged = device.record(Stream.SCHEDULE)\n"
        "        scores = self._prompt_scores(plan, step)\n",
        TOY,
    ),
    Mutation(
        "landing does not wait",
        "poison taken for tokens",
        "runner/runner.py",
        "        self.event.wait()\n",
        "",
        TOY,
    ),
    Mutation(
        "the hostile device takes any order for an edge",
        "a device that finds no missing edge",
        "device/hostile.py",
        "        _join(self._clocks[stream.value], event.clock)\n"
        "        self._queues[stream].append(_Operation(needs=event))\n",
        "        _join(self._clocks[stream.value], event.clock)\n",
        HOSTILE + "test_with_an_edge_only_one_order_is_left",
    ),
    Mutation(
        "the hostile device is not poisoned",
        "a missing wait that reads zeros and passes",
        "device/hostile.py",
        "torch.full(array.shape, POISON, dtype=torch.int64)",
        "torch.from_numpy(array.astype(np.int64))",
        HOSTILE + "test_memory_is_poison_until_its_copy_has_run",
    ),
    Mutation(
        "the hostile device forgets who reads",
        "a buffer used again while it is read",
        "device/hostile.py",
        "            memory.readers[name] = clock[name]\n",
        "",
        HOSTILE + "test_a_missing_edge_is_named_whatever_the_order",
    ),
]

RUNNER = [
    Mutation(
        "sampled tokens are not stashed",
        "a step that runs on the token before last",
        "runner/runner.py",
        "        self._relay.stash(step.slots_dev, tokens)\n",
        "",
        TOY,
    ),
    Mutation(
        "the relay is keyed by row",
        "tokens that change owners when the rows change",
        "runner/runner.py",
        "        self._relay.stash(step.slots_dev, tokens)\n",
        "        self._relay.stash(torch.arange(1, len(tokens) + 1), tokens)\n",
        TOY,
    ),
    Mutation(
        "rows that moved take the tokens of their new places",
        "one request's token read as another's",
        "runner/relay/row.py",
        "(age == 1).all() and (row == np.arange(len(rows))).all()",
        "(age == 1).all()",
        ROW + "test_rows_that_move_are_gathered",
    ),
    Mutation(
        "a row's age is taken a step too young",
        "the token of the step before last",
        "runner/relay/row.py",
        "newer[np.where(known, 1, age) - 1] + row",
        "newer[np.where(known, 1, age) - 2] + row",
        ROW + "test_a_row_is_found_by_its_age",
    ),
    Mutation(
        "the ring is shorter than the steps ahead",
        "a buffer used again before the last reader",
        "runner/relay/row.py",
        "        self._ring: deque[Tensor] = deque(maxlen=depth)\n",
        "        self._ring: deque[Tensor] = deque(maxlen=depth - 2)\n",
        ROW + "test_a_row_is_found_by_its_age",
    ),
    Mutation(
        "the host brings no token to a row that was left out",
        "a row whose token is in no buffer any more",
        "scheduler/scheduler.py",
        "        known = table.promised[at] == 0\n",
        "        known = table.promised[at] < 0\n",
        ROW + "test_short_of_pages_the_host_brings_tokens_and_the_slots_hold_none",
    ),
    Mutation(
        "keys and values are written as they are",
        "one request's overflow spoiling whoever gets its pages next",
        "cache/pools.py",
        "        k.nan_to_num_()\n        v.nan_to_num_()\n",
        "",
        "tests/cpu/test_model_attention.py::test_a_page_stays_finite_whatever_is_written",
    ),
    Mutation(
        "a forked child ends its parent's worker",
        "a worker shut down by somebody else's exit",
        "executor/process.py",
        "        if os.getpid() != self._owner:\n            return",
        "        if False:\n            return",
        "tests/cpu/test_executor_process.py::"
        "test_a_forked_child_that_exits_leaves_the_worker_alone",
    ),
    Mutation(
        "a join's pages are not applied",
        "a prompt written into the old owner's pages",
        "runner/slots.py",
        "        parts = [self._joined(join) for join in plan.joins]\n",
        "        parts = []\n",
        TOY,
    ),
    Mutation(
        "a new owner keeps the old one's page table",
        "a row that reads somebody else's page past its own",
        "runner/slots.py",
        "            self.pages_dev[joined_dev] = 0\n",
        "            pass\n",
        RUNS + "test_past_a_rows_pages_stands_the_padding_page",
    ),
    Mutation(
        "rows uploaded steps ago are read untold",
        "an upload that overwrites them unseen",
        "runner/runner.py",
        "            self._reads += self._rows_reads\n",
        "",
        RUNS + "test_a_step_says_all_that_it_reads",
    ),
    Mutation(
        "wishes uploaded steps ago are read untold",
        "an upload that overwrites them unseen",
        "runner/runner.py",
        "            self._reads += self._group_reads\n",
        "",
        RUNS + "test_a_step_says_all_that_it_reads",
    ),
    Mutation(
        "a join is believed whatever its generation",
        "a stale join that takes a slot over",
        "runner/runner.py",
        "                self._check_join(join)\n",
        "                pass\n",
        RUNS + "test_a_join_that_cannot_be_is_caught",
    ),
    Mutation(
        "a grant is not applied",
        "tokens written into the padding page",
        "runner/slots.py",
        "        if len(plan.grants):\n",
        "        if False:\n",
        TOY,
    ),
    Mutation(
        "the sampler's group outlives its rows",
        "one request's parameters applied to another",
        "runner/runner.py",
        "        if not plan.same_rows:\n            self._group = None\n",
        "",
        TOY,
    ),
    Mutation(
        "slots do not advance",
        "a cell written twice",
        "runner/inputs.py",
        "    slots.length_dev[step.rows_dev] += 1\n",
        "",
        TOY,
    ),
]

SAMPLING = [
    Mutation(
        "a preempted request's outputs count as prompt",
        "penalties that a preemption lifts",
        "runner/runner.py",
        "                split = join.prompt_len\n",
        "                split = len(join.tokens)\n",
        CLOSED,
    ),
    Mutation(
        "noise does not know the position",
        "a seeded request that repeats itself",
        "runner/sampler.py",
        "row_keys(drawn.keys_dev, positions_dev)",
        "row_keys(drawn.keys_dev, positions_dev * 0)",
        CLOSED,
    ),
    Mutation(
        "noise does not know the choice",
        "n answers that are one",
        "runner/noise.py",
        "0x9E3779B97F4A7C15 * (choice + 1)",
        "0x9E3779B97F4A7C15",
        SAMPLER + "test_the_noise_is_the_documented_hash",
    ),
    Mutation(
        "noise by row of the batch",
        "a seeded request that depends on its neighbours",
        "runner/sampler.py",
        "row_keys(drawn.keys_dev, positions_dev)",
        "row_keys(drawn.keys_dev + torch.arange(len(positions_dev)), positions_dev)",
        SAMPLER + "test_a_token_does_not_depend_on_its_batch",
    ),
    Mutation(
        "penalties count what the host has seen",
        "a penalty that comes D steps late",
        "runner/sampler.py",
        "        counts.count(group.penalised.counts_dev, tokens[group.penalised.rows_dev])\n",
        "        pass\n",
        SAMPLER + "test_counts_follow_the_samples_without_the_host",
    ),
    Mutation(
        "penalty counts outlive their owner",
        "a request punished for another one's words",
        "runner/counts.py",
        "        self.prompt_dev[row] = False\n",
        "",
        SAMPLER + "test_counts_of_a_new_owner_start_anew_and_growing_keeps_the_others",
    ),
    Mutation(
        "a slot's bias outlives its owner",
        "one request's bias applied to another",
        "runner/wishes.py",
        "        self._bias.pop(slot, None)\n",
        "",
        SAMPLER + "test_a_new_owner_inherits_no_wish",
    ),
    Mutation(
        "the ban below min_tokens is dropped",
        "an answer shorter than was asked",
        "runner/wishes.py",
        "        if params.min_tokens and stops:\n",
        "        if False:\n",
        SAMPLER + "test_min_tokens_end_the_ban_at_their_position",
    ),
    Mutation(
        "log-probabilities of what was left after sampling",
        "log-probabilities of another distribution",
        "runner/runner.py",
        "describe(raw, tokens[wanted], group.logprob_width)",
        "describe(logits[wanted], tokens[wanted], group.logprob_width)",
        CLOSED,
    ),
]

LIFETIME = [
    Mutation(
        "an abort frees at once",
        "pages given to another while a flight writes them",
        "scheduler/lifetime.py",
        "        if slot not in self.ghosts or self.table.pins[slot]:\n",
        "        if slot not in self.ghosts:\n",
        SCHEDULER + "test_an_abort_in_flight_gives_nothing_back_until_it_lands",
    ),
    Mutation(
        "overshoot tokens count",
        "tokens after the end",
        "scheduler/settle.py",
        "(deaf := table.deaf[at]).any()",
        "(deaf := table.deaf[at] & False).any()",
        PAPER,
    ),
    Mutation(
        "a preempted row's token in flight is dropped",
        "a token that is sampled twice",
        "scheduler/lifetime.py",
        "        self.counters.preemptions += 1\n",
        "        self.counters.preemptions += 1\n        self.table.deaf[entry.slot] = True\n",
        WASTE + "test_without_stops_each_token_is_sampled_once_however_short_the_pages",
    ),
    Mutation(
        "two ends",
        "two terminal messages",
        "scheduler/scheduler.py",
        "            if entry is not None and entry.standing is not Standing.ENDED:\n",
        "            if entry is not None:\n",
        PAPER,
    ),
    Mutation(
        "a stop rule is left behind",
        "a look-up that flags ever more tokens",
        "scheduler/lifetime.py",
        "        self.stops.remove(entry.rule)\n",
        "",
        PAPER,
    ),
    Mutation(
        "a released slot keeps its generation",
        "a foreign completion taken for the new owner's",
        "scheduler/table.py",
        "        self.generation[slot] += 1\n",
        "",
        "tests/pure/test_table.py::test_a_slot_comes_back_clean_and_one_generation_on",
    ),
    Mutation(
        "a lost runner's plans count as written",
        "pages found by others that nobody ever wrote",
        "scheduler/scheduler.py",
        "        self.table.planned -= self.table.in_flight\n",
        "",
        SCHEDULER + "test_a_lost_runner_ends_everyone_once_and_leaves_no_unwritten_page",
    ),
    Mutation(
        "a preempted request keeps no outputs",
        "an answer that begins again",
        "scheduler/lifetime.py",
        "            entry.tokens = self.known_tokens(entry)\n",
        "            pass\n",
        PAPER,
    ),
    Mutation(
        "closing forgets who waits",
        "a request that never hears its end",
        "scheduler/scheduler.py",
        "        return list(self._entries)\n",
        "        return [rid for rid, entry in self._entries.items() if entry.slot]\n",
        "tests/pure/test_engine_ends.py::test_closing_ends_everyone_once",
    ),
]

PLANNING = [
    Mutation(
        "stop rules are not looked at",
        "an answer that goes on after its end",
        "scheduler/scheduler.py",
        "self.stops.candidates(news.tokens, watch).tolist()",
        "self.stops.candidates(news.tokens[:0], watch[:0]).tolist()",
        CLOSED,
    ),
    Mutation(
        "every row is looked at for anybody's rule",
        "one client's stop string that slows every row",
        "scheduler/stop.py",
        "return (self._kinds[tokens] & watch).nonzero()[0]",
        "return self._kinds[tokens].nonzero()[0]",
        "tests/pure/test_stop.py::test_one_requests_strings_are_nobody_elses_work",
    ),
    Mutation(
        "who was refused is not asked again when pages are published",
        "a request that waits though it shares what is there by now",
        "cache/store.py",
        "        self.changes += taken > 0\n",
        "",
        SCHEDULER + "test_a_refused_request_is_let_in_when_its_prefix_is_published",
    ),
    Mutation(
        "a row certain to end is launched again",
        "a wasted row for each request",
        "scheduler/rows.py",
        "        table.decoding[ending] = False\n",
        "",
        SCHEDULER + "test_a_row_certain_to_end_is_never_launched_again",
    ),
    Mutation(
        "pages come one step late",
        "a token written where the slot has no page",
        "scheduler/rows.py",
        "        return int(ahead.min())\n",
        "        return int(ahead.min()) + 1\n",
        PAPER,
    ),
    Mutation(
        "nobody yields while nothing is on its way",
        "requests that wait for each other's pages for ever",
        "scheduler/rows.py",
        "            if self._coming > owed or not self._losers:\n",
        "            if self._coming >= owed or not self._losers:\n",
        PAPER,
    ),
    Mutation(
        "wanted prompt log-probabilities take a hit",
        "a prompt whose first log-probabilities never come",
        "scheduler/lifetime.py",
        "store.match(tokens) if entry.request.params.prompt_logprobs is None else []\n",
        "store.match(tokens)\n",
        SCHEDULER + "test_wanted_prompt_logprobs_take_no_hit",
    ),
    Mutation(
        "the oldest may be a victim",
        "two requests that preempt each other for ever",
        "scheduler/policy.py",
        "    return sorted(running, key=lambda entry: entry.arrival)\n",
        "    return sorted(running, key=lambda entry: -entry.arrival)\n",
        SCHEDULER + "test_the_youngest_yields_and_every_answer_is_whole",
    ),
    Mutation(
        "admission leaves no page for those that run",
        "a newcomer that is preempted at once",
        "scheduler/lifetime.py",
        "        if store.available < needed + spare:\n",
        "        if store.available < needed:\n",
        SCHEDULER + "test_an_admission_leaves_a_page_for_each_running_row",
    ),
    Mutation(
        "matched pages are held too late",
        "a hit on a page that was evicted for it",
        "scheduler/lifetime.py",
        "        store.tree.hold(hit)  # before counting: a matched page is no longer evictable\n"
        "        if store.available < needed + spare:\n"
        "            store.tree.release(hit, (), tokens[:0])\n"
        "            return None\n"
        "        fresh = store.take(needed)\n",
        "        if store.available < needed + spare:\n"
        "            return None\n"
        "        fresh = store.take(needed)\n"
        "        store.tree.hold(hit)\n",
        PAPER,
    ),
    Mutation(
        "log-probabilities keep the rows of the result",
        "log-probabilities of the neighbour",
        "scheduler/heard.py",
        "            rows=place[values.rows[keep]].astype(np.int32),\n",
        "            rows=values.rows[keep],\n",
        PAPER,
    ),
    Mutation(
        "rows are not sent when they changed",
        "a step that runs the rows of the step before",
        "scheduler/scheduler.py",
        "same, self._sent_rows = rows is self._sent_rows, rows\n",
        "same, self._sent_rows = rows.count == self._sent_rows.count, rows\n",
        PAPER,
    ),
    Mutation(
        "the overlap loop looks at once",
        "a host that the device waits for",
        "loop/overlap.py",
        "    if core.flights == core.depth or (core.flights and not launched):\n",
        "    if core.flights:\n",
        WASTE + "test_stop_tokens_launch_one_step_more_for_each_step_ahead",
    ),
]

PAGES = [
    Mutation(
        "planned prompt pages are published",
        "a prefix hit on what no step has written yet",
        "scheduler/settle.py",
        "        settled = table.planned[slots] - table.in_flight[slots]\n",
        "        settled = table.planned[slots]\n",
        PAPER,
    ),
    Mutation(
        "an overshoot's position is published",
        "a prefix hit on a token that the mirror never had",
        "scheduler/lifetime.py",
        "        written = min(table.settled(slot), int(table.length[slot]) - 1)\n",
        "        written = table.settled(slot)\n",
        SCHEDULER + "test_what_an_overshoot_wrote_is_found_by_nobody",
    ),
    Mutation(
        "a chain is let go root first",
        "a page evicted before its children",
        "cache/prefix.py",
        "        for page in reversed(chain):\n",
        "        for page in chain:\n",
        TREE,
    ),
    Mutation(
        "use does not make a page young",
        "the warmest pages evicted first",
        "cache/prefix.py",
        "                idle.move_to_end(page)\n",
        "",
        "tests/pure/test_prefix.py::test_a_duplicate_makes_its_twin_young_again",
    ),
    Mutation(
        "a duplicate page is lost",
        "a pool that shrinks",
        "cache/store.py",
        "        if duplicates:\n            self.free.give(np.array(duplicates, np.int32))\n",
        "",
        TREE,
    ),
    Mutation(
        "a hit covers the whole prompt",
        "a prompt of which nothing is left to compute",
        "cache/store.py",
        "        most = (len(tokens) - 1) // self.page_size\n",
        "        most = len(tokens) // self.page_size\n",
        "tests/pure/test_pages.py::test_a_hit_leaves_a_token_to_compute",
    ),
    Mutation(
        "tokens are appended to the page before",
        "a prefix key of other tokens than the page holds",
        "scheduler/settle.py",
        "        turned = ((position & (size - 1)) == 0).nonzero()[0]\n",
        "        turned = ((position & (size - 1)) == 1).nonzero()[0]\n",
        PAPER,
    ),
    Mutation(
        "a stop string is looked for in its last token only",
        "a stop string across tokens that is missed",
        "scheduler/stop.py",
        "np.concatenate([*tails, self._holding(text)])",
        "self._holding(text)",
        "tests/pure/test_stop.py::test_every_end_of_a_naive_search_is_found_and_no_other",
    ),
]

MUTATIONS = [*EDGES, *RUNNER, *SAMPLING, *LIFETIME, *PLANNING, *PAGES]
