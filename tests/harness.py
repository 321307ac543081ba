"""Random workloads, run on any loop and device, and compared request by request.

`play` runs a workload on an engine and writes down what each client was told; `differences` holds
two such records against each other by promise 1, and `check` does both for a seed.  Loads no torch
until an engine on a real device is asked for.

    python tests/harness.py --seed 17 --keep 0,2 --loop overlap --device hostile --device-seed 3

replays one workload (with only the requests 0 and 2) against the serial loop on the cpu.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines import MODES, ORACLE, Shapes, Variant, toy_engine
from stepahead.engine import Engine
from stepahead.errors import RequestError
from stepahead.scheduler.check import check as check_balance
from stepahead.scheduler.lifetime import Entry
from stepahead.scheduler.scheduler import Scheduler
from stepahead.structured import Grammar
from stepahead.types import Finish, HiddenRows, LogprobRows, Outputs, StateSums
from workloads import Abort, Ask, Workload, workload

MOST_STEPS = 3000


# --- running --------------------------------------------------------------------------------

Row = tuple[float, int, tuple[int, ...], tuple[float, ...]]


@dataclass
class Told:
    """All that one client heard of one choice.  Log-probabilities are (chosen, rank, best ids,
    best values), cut to the width it asked for; those of the prompt by position, as told first,
    and in `retold` beside what was told there later.  `hidden` has a state for each token,
    `pooled` by its first position each stretch of the prompt whose states it was told the sum of:
    (positions, sum); one that begins anew, after a preemption, replaces all of them."""

    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Row] = field(default_factory=list)
    prompt_logprobs: dict[int, Row] = field(default_factory=dict)
    retold: list[tuple[Row, Row]] = field(default_factory=list)
    hidden: list[tuple[float, ...]] = field(default_factory=list)
    pooled: dict[int, tuple[int, tuple[float, ...]]] = field(default_factory=dict)
    firsts: int = 0
    finish: Finish | None = None
    refused: str = ""

    @property
    def aborted(self) -> bool:
        """Whether it, or the engine, gave up before its end."""
        return self.finish is not None and self.finish.reason in ("abort", "error")

    @property
    def ended_early(self) -> bool:
        """Whether the scheduler could not foresee its end."""
        return self.finish is not None and self.finish.reason != "length"


Who = tuple[int, int]  # request of the workload, choice


@dataclass
class Run:
    """What came of a workload: by client, and counts of what was met on the way."""

    told: dict[Who, Told]
    counts: Counter[str]
    steps: int


class Client:
    """Plays a workload on an engine and holds it to one end each, balance and frontiers."""

    def __init__(self, engine: Engine, work: Workload, failing: bool = False) -> None:
        """`failing`: the device is made to fail, so requests may end with `error`."""
        self.engine = engine
        self.work = work
        self.failing = failing
        self.run = Run({}, Counter(), 0)
        self._who: dict[int, Who] = {}  # by request id
        self._rids: dict[Who, int] = {}
        self._aborts: list[tuple[Who, Abort]] = []
        # reaches in, to count preemptions with a flight in the air; nothing in src/ needs to
        self._preempt = engine.scheduler.life.preempt
        engine.scheduler.life.preempt = self._watch_preempt  # type: ignore[method-assign]

    def _watch_preempt(self, entry: Entry) -> None:
        pins = int(self.engine.scheduler.table.pins[entry.slot])
        self.run.counts["preempted in flight"] += pins > 0
        self._preempt(entry)

    def play(self) -> Run:
        """Runs it to the end, or to where it is shut down or fails."""
        asks = list(enumerate(self.work.asks))
        while asks or self.engine.has_work:
            step = self.run.steps
            assert step < MOST_STEPS, "the engine makes no progress"
            while asks and asks[0][1].at <= step:
                self._add(*asks.pop(0))
            if step == self.work.shutdown:
                self._shut_down()
                break
            if step in self.work.flushes:
                self.run.counts["cache resets"] += self.engine.scheduler.flush_cache() > 0
            self._abort("step", lambda who, n: n <= self.run.steps)
            if self.engine.has_work and (outputs := self.engine.step()) is not None:
                self._hear(outputs)
            self._abort("token", lambda who, n: len(self.run.told[who].tokens) >= n)
            self._abort("end", lambda who, n: self.run.told[who].finish is not None)
            check_frontiers(self.engine.scheduler)
            self.run.steps += 1
            if self.engine.failure is not None and not self.engine.has_work:
                self.run.counts["failures"] += 1
                break
        self._finish()
        return self.run

    def _shut_down(self) -> None:
        counts = self.run.counts
        counts["shutdowns"] += 1
        counts["shutdowns with flights in the air"] += self.engine._core.flights > 0
        self.engine.close()
        while self.engine.has_work:
            outputs = self.engine.step()
            assert outputs is not None, "a closed engine with something to do and nothing to tell"
            self._hear(outputs)

    def _add(self, index: int, ask: Ask) -> None:
        try:
            rids = self.engine.add(list(ask.prompt), ask.params, grammar=self._grammar(ask))
        except RequestError as error:
            self.run.told[index, 0] = Told(refused=str(error))
            self.run.counts["refused"] += 1
            return
        for choice, rid in enumerate(rids):
            who = index, choice
            self._who[rid], self._rids[who] = who, rid
            self.run.told[who] = Told(seed=self.engine.scheduler._entries[rid].request.seed)
            if ask.abort is not None:
                self._aborts.append((who, ask.abort))

    def _grammar(self, ask: Ask) -> Grammar | None:
        asked = ask.params.structured_outputs
        if asked is None:
            return None
        from structured import compiled

        assert asked.regex is not None
        return compiled(self.work.options["vocab_size"], asked.regex)

    def _abort(self, when: str, due: Callable[[Who, int], bool]) -> None:
        for who, abort in [*self._aborts]:
            if abort.when == when and due(who, abort.n):
                self._aborts.remove((who, abort))
                rid = self._rids[who]
                self.run.counts[f"abort {standing(self.engine.scheduler, rid)}"] += 1
                self.run.counts["aborts between parts"] += self.engine._core.half_landed
                self.engine.abort(rid)
                check_frontiers(self.engine.scheduler)

    def _hear(self, outputs: Outputs) -> None:
        told = self.run.told
        rids, tokens = outputs.rids.tolist(), outputs.tokens.tolist()
        width = self.engine.resolved.config.step_width
        assert len(rids) == len(tokens), "a token of nobody"
        most = max(Counter(rids).values(), default=0)
        assert most <= width, "a request got more tokens of a step than it has positions"
        self.run.counts["drafts accepted"] += len(rids) - len({*rids})
        for rid, token in zip(rids, tokens, strict=True):
            one = told[self._who[rid]]
            assert one.finish is None, "a token after the end"
            one.tokens.append(token)
        for rid in outputs.first:
            one = told[self._who[rid]]
            one.firsts += 1
            assert len(one.tokens) == 1, "a first token that is not the first"
        self._hear_logprobs(outputs)
        if outputs.hidden is not None:
            self._hear_hidden(outputs, outputs.hidden)
        if outputs.pooled is not None:
            self._hear_pooled(outputs.pooled)
        for finish in outputs.finishes:
            self._hear_end(finish)

    def _hear_end(self, finish: Finish) -> None:
        one = self.run.told[self._who[finish.rid]]
        assert one.finish is None, "two ends"
        dead_end = finish.error.startswith(("the grammar can't go on", "the logits processor"))
        assert finish.reason != "error" or self.failing or dead_end, finish.error
        self.run.counts["dead ends"] += dead_end
        one.finish = finish
        assert finish.tokens.tolist() == one.tokens, "the end lists other tokens than came"

    def _hear_logprobs(self, outputs: Outputs) -> None:
        if (values := outputs.logprobs) is not None:
            for i, row in enumerate(values.rows.tolist()):
                who = self._who[int(outputs.rids[row])]
                width = self.work.asks[who[0]].params.logprobs
                assert width is not None, "log-probabilities that nobody asked for"
                self.run.told[who].logprobs.append(_row(values, i, width))
        for prompt in outputs.prompt_logprobs:
            who = self._who[prompt.rid]
            width = self.work.asks[who[0]].params.prompt_logprobs
            assert width is not None, "prompt log-probabilities that nobody asked for"
            heard = self.run.told[who].prompt_logprobs
            for i, row in enumerate(prompt.values.rows.tolist()):
                value = _row(prompt.values, i, width)
                # after a preemption the prompt is computed, and told, again
                self.run.told[who].retold.append(
                    (heard.setdefault(prompt.start + row, value), value)
                )

    def _hear_hidden(self, outputs: Outputs, values: HiddenRows) -> None:
        assert values.values.dtype == np.float32
        states = values.values.reshape(len(values.rows), values.width).tolist()
        for row, state in zip(values.rows.tolist(), states, strict=True):
            who = self._who[int(outputs.rids[row])]
            assert self.work.asks[who[0]].params.return_hidden_states, "states nobody asked for"
            self.run.told[who].hidden.append(tuple(state))
            self.run.counts["hidden states"] += 1

    def _hear_pooled(self, values: StateSums) -> None:
        assert values.sums.dtype == np.float64
        sums = values.sums.reshape(len(values.owners), values.width).tolist()
        columns = (values.owners.tolist(), values.starts.tolist(), values.counts.tolist(), sums)
        for rid, start, count, total in zip(*columns, strict=True):
            who = self._who[rid]
            assert self.work.asks[who[0]].params.pooling, "a pool that nobody asked for"
            heard = self.run.told[who].pooled
            if heard and start == 0:
                self.run.counts["pools begun anew"] += 1
                heard.clear()
            heard[start] = count, tuple(total)
            self.run.counts["pools in chunks"] += len(heard) > 1

    def _finish(self) -> None:
        # a step that fails when everybody has ended fails unheard
        assert self.failing or self.engine.failure is None, self.engine.failure
        for (index, choice), one in self.run.told.items():
            if not one.refused:
                assert one.finish is not None, f"{index, choice} never heard its end"
                self._finish_one(self.work.asks[index], choice, one, one.finish)
        scheduler, counts = self.engine.scheduler, self.run.counts
        scheduler.check_at_rest()
        counts.update(scheduler.life.counters.as_dict())
        drafts = self.engine.resolved.config.step_width > 1
        early = sum(one.ended_early or drafts for one in self.run.told.values())
        # a row is planned again when its token has come through all stages
        ahead = -(-(self.engine._core.depth - 1) // self.engine.resolved.config.pipeline_stages)
        # the token that says that an answer can't go on is void; so is that of a late row, aborted
        # when the others of its step have been told
        most = early * ahead + counts["dead ends"] + counts["aborts between parts"]
        assert counts["overshoot_rows"] <= most, "more rows wasted than D - 1 an end"
        self.engine.close()

    def _finish_one(self, ask: Ask, choice: int, one: Told, end: Finish) -> None:
        assert one.firsts == bool(one.tokens), "not one first token"
        if ask.params.logprobs is not None:
            assert len(one.logprobs) == len(one.tokens), "a token without log-probabilities"
        if ask.params.return_hidden_states:
            assert len(one.hidden) == len(one.tokens), "a token without its hidden state"
        if ask.params.pooling is not None:
            assert not one.tokens, "a token of a prompt that was to be pooled"
            if end.reason == "length":
                hold_stretches(one.pooled, ask)
        assert 0 <= end.cached_tokens < len(ask.prompt), "nothing was left to compute"
        assert end.cached_tokens % self.work.options["page_size"] == 0, "half a page was cached"
        # the first choice tells the prompt's log-probabilities for all of them
        told_prompt = ask.params.prompt_logprobs is not None and choice == 0
        assert told_prompt or not one.prompt_logprobs, "told the prompt's log-probabilities again"
        if told_prompt or not self.work.options.get("prefix_cache", True):
            assert end.cached_tokens == 0, "cached without a cache"


def hold_stretches(pooled: dict[int, tuple[int, tuple[float, ...]]], ask: Ask) -> None:
    """Each position once, and none left out."""
    at = 0 if ask.params.pooling == "mean" else len(ask.prompt) - 1
    for start, (count, _) in sorted(pooled.items()):
        assert start == at, "a position was pooled twice, or never"
        at = start + count
    assert at == len(ask.prompt), "the end of a prompt was not pooled"


def _row(values: LogprobRows, i: int, width: int) -> Row:
    ids = values.top_ids.reshape(len(values.rows), values.width)[i, :width]
    best = values.top.reshape(len(values.rows), values.width)[i, :width]
    return float(values.chosen[i]), int(values.rank[i]), tuple(ids.tolist()), tuple(best.tolist())


def standing(scheduler: Scheduler, rid: int) -> str:
    """Where a request stands, for the counts of aborts."""
    entry = scheduler._entries.get(rid)
    if entry is None:
        ghosts = scheduler.life.ghosts
        return "overshoot" if any(scheduler.table.rid[slot] == rid for slot in ghosts) else "ended"
    if not entry.slot:
        return entry.standing.value
    flying = " in flight" if scheduler.table.pins[entry.slot] else ""
    return entry.standing.value + flying


def check_frontiers(scheduler: Scheduler) -> None:
    """Balance, and what the design says of frontiers, held from outside after every step."""
    check_balance(scheduler.life, scheduler._launched)
    table, size = scheduler.table, scheduler.limits.page_size
    planned, in_flight, *_ = table.folded()  # looking at the columns would bring them up to date
    settled = planned - in_flight
    assert (settled >= 0).all(), "in flight is more than planned"
    assert (table.held * size <= settled).all(), "a page in the tree is not settled"
    store = scheduler.store
    holders = np.array(store.tree.holders)
    assert not holders[store.free.listed()].any(), "a free page is held"
    held = np.zeros(store.num_pages, np.int64)
    for slot in range(table.num_slots):
        np.add.at(held, table.pages_of(slot)[: table.held[slot]], 1)
    assert (held == holders).all(), "holders are not the slots that hold"
    assert scheduler.life.running <= scheduler.limits.max_rows, "too many rows"


def play(work: Workload, variant: Variant = ORACLE) -> Run:
    """The workload on a toy engine of this variant."""
    shapes = Shapes()
    engine = toy_engine(work.options, variant, shapes.see)
    run = Client(engine, work, failing=variant.fail_at > 0).play()
    run.counts.update(shapes.counts)
    return run


def play_drafted(work: Workload, variant: Variant) -> Run:
    """As `play`; a run without drafts teaches the drafters of `drafters` its answers."""
    run = play(work, variant)
    if not variant.draft:
        learn_from(run, work)
    return run


def learn_from(run: Run, work: Workload) -> None:
    """From now on the drafters of `drafters` know what each request of the workload was told."""
    from drafters import key, learn

    truth = {}
    for (ask, choice), one in run.told.items():
        asked = work.asks[ask]
        truth[key(one.seed, choice, asked.prompt, asked.params)] = one.tokens
    learn(truth)


# --- comparing ------------------------------------------------------------------------------


def differences(oracle: Run, other: Run, compare: Callable[[Told, Told], str]) -> list[str]:
    """One line for each client that was told something else."""
    assert oracle.told.keys() == other.told.keys()
    lines = ((who, compare(one, other.told[who])) for who, one in oracle.told.items())
    return [f"request {ask} choice {choice}: {line}" for (ask, choice), line in lines if line]


def exactly(one: Told, two: Told) -> str:
    """What differs by promise 1 on a model whose numbers are exact; "" if nothing does."""
    if one.refused or two.refused:
        return "" if one.refused == two.refused else f"refused: {one.refused!r}, {two.refused!r}"
    short = min(len(one.tokens), len(two.tokens))
    cut = one.aborted or two.aborted
    if one.tokens[:short] != two.tokens[:short] or (not cut and len(one.tokens) != len(two.tokens)):
        return f"tokens {one.tokens} and {two.tokens}"
    if unlike := [pair for pair in one.retold + two.retold if pair[0] != pair[1]]:
        return f"told two prompt logprobs: {unlike}"
    if one.logprobs[:short] != two.logprobs[:short]:
        return f"logprobs {one.logprobs} and {two.logprobs}"
    if one.hidden[:short] != two.hidden[:short]:
        return f"hidden states {one.hidden} and {two.hidden}"
    if not cut and not np.allclose(pool_of(one), pool_of(two), 1e-12, _ROUNDED):
        return f"pools {pool_of(one)} and {pool_of(two)}"
    shared = one.prompt_logprobs.keys() & two.prompt_logprobs.keys() if cut else None
    for at in shared if cut else one.prompt_logprobs.keys() | two.prompt_logprobs.keys():
        if one.prompt_logprobs.get(at) != two.prompt_logprobs.get(at):
            return f"prompt logprobs at {at}"
    if not one.aborted and two.aborted and len(two.tokens) > len(one.tokens):
        return "an aborted request got more than a finished one"
    return "" if cut or ends_of(one) == ends_of(two) else f"ends {ends_of(one)}, {ends_of(two)}"


_ROUNDED = 1e4  # the toy's states go up to 2 ** 63, and a float64 of that size has steps of 1,024


def pool_of(told: Told) -> list[float]:
    """The sum of all stretches; empty where there are none."""
    sums = [total for _, total in told.pooled.values()]
    return [sum(column) for column in zip(*sums, strict=True)]


def ends_of(told: Told) -> tuple[str, int | str | None, int, int]:
    """Reason, stop reason, bytes behind the stop, and tokens billed."""
    assert told.finish is not None
    end = told.finish
    return end.reason, end.stop_reason, end.stop_end_bytes, len(end.tokens)


def check(
    seed: int,
    variants: Sequence[Variant],
    make: Callable[[int], Workload] = workload,
    player: Callable[[Workload, Variant], Run] = play,
    compare: Callable[[Told, Told], str] = exactly,
    oracle: Variant = ORACLE,
    replay: str = "tests/harness.py",
) -> tuple[Run, Counter[str]]:
    """Plays a seed's workload on the oracle and on each variant; the oracle's run and all counts.

    AssertionError with one line that replays the smallest workload found that still fails.
    """
    work = make(seed)

    def fault(kept: Sequence[int], variant: Variant) -> str:
        try:
            smaller = work.keeping(kept)
            lines = differences(player(smaller, oracle), player(smaller, variant), compare)
        except AssertionError as error:
            return f"{type(error).__name__}: {error}"
        return "; ".join(lines)

    everyone = list(range(len(work.asks)))
    try:
        right = player(work, oracle)
        counts = Counter(right.counts)
        for variant in variants:
            run = player(work, variant)
            counts.update(run.counts)
            assert not differences(right, run, compare), variant
    except AssertionError:
        variant, kept, line = _shrunk(everyone, [oracle, *variants], fault)
        raise AssertionError(
            f"{line}\nreplay: python {replay} --seed {seed} "
            f"--keep {','.join(map(str, kept))} {variant}"
        ) from None
    return right, counts


def _shrunk(
    everyone: list[int], variants: list[Variant], fault: Callable[[Sequence[int], Variant], str]
) -> tuple[Variant, list[int], str]:
    """Drops requests one by one as long as some variant still fails."""
    variant = next((v for v in variants if fault(everyone, v)), variants[-1])
    kept = everyone
    for index in everyone:
        fewer = [i for i in kept if i != index]
        if fewer and fault(fewer, variant):
            kept = fewer
    return variant, kept, fault(kept, variant) or "failed once, not again"


def replay(
    make: Callable[[int], Workload],
    player: Callable[[Workload, Variant], Run],
    compare: Callable[[Told, Told], str],
) -> None:
    """Reads one replay line from the command line and prints what differs."""
    parser = argparse.ArgumentParser(description=replay.__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--keep", default="", help="numbers of the requests to keep, all if empty")
    parser.add_argument("--loop", default="overlap")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--fence", default="fine")
    parser.add_argument("--mode", default="plain", choices=MODES)
    parser.add_argument("--fail-at", type=int, default=0)
    parser.add_argument("--model", default="toy", choices=("toy", "captured"))
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--draft", default="")
    parser.add_argument("--drafts", type=int, default=0)
    given = parser.parse_args()
    work = make(given.seed)
    if given.keep:
        work = work.keeping([int(i) for i in given.keep.split(",")])
    print(work.options)
    for ask in work.asks:
        print(ask)
    device = given.device, given.device_seed
    how = (
        given.fence,
        given.mode,
        given.fail_at,
        given.model,
        given.stages,
        given.draft,
        given.drafts,
    )
    variant = Variant(given.loop, *device, given.depth, *how)
    oracle = Variant(device="paper" if given.device == "paper" else "cpu")
    lines = differences(player(work, oracle), player(work, variant), compare)
    print("\n".join(lines) or "the same")


if __name__ == "__main__":
    replay(workload, play_drafted, exactly)
