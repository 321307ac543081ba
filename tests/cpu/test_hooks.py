"""Tokens and words that may not come, and a user's logits processor: against brute force, in every
loop and at every depth, on the hostile device, with drafts, after preemptions.

`closed_form` says what is forbidden by looking at the outputs as a list; nothing here shares that
with the engine, which never sees the outputs of a step before it launches the next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_closed_form import answers, hold
from test_parity_llama import MODELS as LLAMAS
from test_parity_llama import Nearly, engine_of

from closed_form import barred_by
from engines import MODES, Variant, inline, resolved, runner_spec, toy_engine
from harness import Client, Run, Told, check, learn_from, play, play_drafted
from stepahead.errors import ConfigError, InvalidParameter
from stepahead.plan import NO_INTS, Join
from stepahead.runner.history import TokenHistory
from stepahead.runner.hooks import HookWishes
from stepahead.runner.processor import Loaded, load_processor
from stepahead.sync import SyncCounts, SyncReason
from stepahead.types import SamplingParams
from workloads import Ask, Workload, hooked, hooked_on_host

CPU = torch.device("cpu")
OPTIONS = {"vocab_size": 17, "max_model_len": 64, "page_size": 4, "max_rows": 4, "num_pages": 64}
LOOPS = (("serial", 0), ("overlap", 0), ("batch-queue", 2), ("batch-queue", 3), ("batch-queue", 5))
DRAFTERS = ("", "drafters:Half", "", "drafters:Never", "ngram")


def upload(array: np.ndarray) -> torch.Tensor:
    """As the eager device does."""
    return torch.from_numpy(array.astype(np.int64))


# --- against brute force --------------------------------------------------------------------


def test_serial_keeps_to_bans_and_processor_as_brute_force_does() -> None:
    counts: Counter[str] = Counter()
    for seed in range(40):
        for ask, told, answer in answers(hooked(seed)):
            try:
                hold(ask, told, answer)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {ask}: {told} is not {answer}") from error
            counts["tokens"] += len(answer.tokens)
            counts["sure"] += answer.sure
            for at in range(len(told.tokens)):
                counts["bans"] += bool(
                    barred_by(
                        [w for w in ask.params.bad_word_ids or () if len(w) > 1], told.tokens[:at]
                    )
                )
            counts["processed"] += len(told.tokens) * bool(ask.params.extra_args)
    assert counts["sure"] > 0.95 * counts["tokens"] > 200
    assert counts["bans"] > 60
    assert counts["processed"] > 60


def variant_of(seed: int) -> Variant:
    """Loop and depth, device and its ways, drafter and number of drafts, so that all pairs come
    up."""
    loop, depth = LOOPS[seed % 5]
    device = ("hostile", "cpu")[seed // 5 % 2]
    draft = DRAFTERS[seed // 10 % 5]
    model = "captured" if device == "hostile" and seed % 3 == 0 else "toy"
    mode = tuple(MODES)[seed % 4] if device == "hostile" else "plain"
    drafts = 1 + seed // 7 % 6 if draft else 0
    return Variant(loop, device, seed, depth, mode=mode, model=model, draft=draft, drafts=drafts)


@pytest.mark.parametrize("shard", range(2))
def test_every_loop_keeps_to_bans_and_processor_as_serial_does(shard: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(shard * 40, shard * 40 + 40):
        counts += check(seed, [variant_of(seed)], hooked, play_drafted)[1]
    met = ("preemptions", "preempted in flight", "slot_reuses", "chunks", "drafts accepted")
    assert [name for name in met if not counts[name]] == []
    assert counts["refused"] < counts["finished"] / 20


@pytest.mark.parametrize("seed", range(3))
def test_stages_keep_to_bans_and_processor(seed: int) -> None:
    """The last stage alone has logits, and it alone remembers tokens."""
    for offset in range(4):
        device = ("hostile", "cpu")[offset % 2]
        variant = Variant("batch-queue", device, seed, 3 + offset % 2, stages=2 + seed % 2)
        check(300 + 4 * seed + offset, [variant], hooked)


def play_llama(work: Workload, variant: Variant) -> Run:
    """The workload on the random Llama of its vocabulary; no bad word comes, and nothing that is
    not allowed."""
    engine = engine_of(LLAMAS[work.options["vocab_size"]], work.options, variant)
    run = Client(engine, work).play()
    for (ask, _), told in run.told.items():
        hold_bans(work.asks[ask].params, told)
    if not variant.draft:
        learn_from(run, work)
    return run


def hold_bans(params: SamplingParams, told: Told) -> None:
    """No word that may not come stands in the outputs, and no token that is not allowed."""
    words = params.bad_word_ids or ()
    for at, token in enumerate(told.tokens):
        assert token not in barred_by(words, told.tokens[:at]), "a bad word"
    if params.allowed_token_ids is not None:
        assert {*told.tokens} <= {*params.allowed_token_ids}


def plainly_hooked(seed: int) -> Workload:
    """`hooked`, where every request asks for enough log-probabilities to see forks."""
    work = hooked(seed)

    def asking(ask: Ask) -> Ask:
        wanted = max(3, ask.params.logprobs or 0)
        own = msgspec.structs.replace(ask.params, logprobs=wanted)
        return replace(ask, params=own)

    return replace(work, asks=tuple(map(asking, work.asks)))


def test_a_tiny_llama_keeps_to_bans_in_every_loop_and_with_drafts() -> None:
    counts: Counter[str] = Counter()
    nearly = Nearly()
    for seed in range(400, 412):
        loop, depth = LOOPS[seed % 5]
        draft = ("", "drafters:Half", "ngram")[seed % 3]
        device = ("hostile", "cpu")[seed % 2]
        variant = Variant(loop, device, seed, depth, draft=draft, drafts=3 if draft else 0)
        counts += check(seed, [variant], plainly_hooked, play_llama, nearly)[1]
    assert nearly.tokens > 100
    assert nearly.forks <= 2
    assert counts["finished"] > 24


# --- one matcher against another ------------------------------------------------------------

WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)
TOKENS = st.lists(st.integers(0, 3), max_size=5)


@st.composite
def steps_of(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Drafts of a row in each step, and what it sampled there, one more."""
    width = draw(st.integers(0, 3))
    count = draw(st.integers(1, 6))
    run = st.lists(st.integers(0, 3), min_size=width + 1, max_size=width + 1)
    drafts = st.lists(st.integers(0, 3), min_size=width, max_size=width)
    return [(draw(drafts), draw(run)) for _ in range(count)]


@given(WORDS, WORDS, TOKENS.filter(len), TOKENS, steps_of())
@settings(max_examples=150, deadline=None)
def test_bad_words_are_what_a_plain_matcher_finds(
    words: list[list[int]],
    others: list[list[int]],
    prompt: list[int],
    known: list[int],
    steps: list[tuple[list[int], list[int]]],
) -> None:
    """A row that was preempted after `known` outputs, beside one of other words that stands still:
    at each sampled position, along its drafts, just the last tokens of words that would be whole
    are forbidden."""
    history = TokenHistory(64, CPU)
    wishes = HookWishes(4, 8, history, None)
    for slot, own in ((3, others), (1, words)):
        params = SamplingParams(bad_word_ids=own, max_tokens=None)
        tokens = np.array(prompt + known, np.int32)
        join = Join(slot, 0, tokens, len(prompt), 0, NO_INTS, params, 0, 0)
        place = wishes.enter(join)
        assert (place is not None) == any(len(word) > 1 for word in own)
        if place is not None:
            history.start(place, upload(tokens))
    width = len(steps[0][1])
    group = wishes.group(np.array([1] * width + [3]), upload)
    assert group is not None
    outputs = known.copy()
    for drafts, sampled in steps:
        last = len(prompt) + len(outputs)
        positions = torch.tensor([*range(last, last + width), len(prompt) + len(known)])
        before = torch.full((width + 1, max(1, width - 1)), -1)
        for row in range(width):
            before[row, :row] = torch.tensor(drafts[:row], dtype=torch.int64)
        logits = torch.zeros((width + 1, 8))
        group.edit(logits, positions, before if width > 1 else None)
        rows = [{*row.isinf().nonzero().flatten().tolist()} for row in logits]
        wanted = [barred_by(words, outputs + drafts[:row]) for row in range(width)]
        assert rows == [*wanted, barred_by(others, known)]
        group.keep(positions, torch.tensor([*sampled, 3]))
        right = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), width - 1)
        outputs += sampled[: right + 1]


def test_a_new_owner_is_rid_of_the_old_ones_bans_and_history() -> None:
    history = TokenHistory(16, CPU)
    wishes = HookWishes(3, 64, history, None)

    def forbidden(params: SamplingParams, prompt: list[int], outputs: list[int]) -> list[int]:
        tokens = np.array(prompt + outputs, np.int32)
        place = wishes.enter(Join(1, 0, tokens, len(prompt), 0, NO_INTS, params, 0, 0))
        if place is not None:
            history.start(place, upload(tokens))
        group = wishes.group(np.array([1]), upload)
        logits = torch.zeros((1, 64))
        if group is not None:
            group.edit(logits, torch.tensor([len(tokens)]), None)
        wishes.leave(1)
        found: list[int] = logits[0].isinf().nonzero().flatten().tolist()
        return found

    words = SamplingParams(bad_word_ids=[[5, 6], [7]])
    assert forbidden(words, [2, 3], [5]) == [6, 7]
    assert forbidden(words, [2, 5], []) == [7]  # what the prompt says forbids nothing
    assert forbidden(words, [2], []) == [7]  # nor what the old owner said
    allowed = SamplingParams(allowed_token_ids=[0, 40, 63])
    assert forbidden(allowed, [2], [3]) == sorted({*range(64)} - {0, 40, 63})
    assert forbidden(SamplingParams(), [2], [3]) == []


def test_the_history_keeps_other_rows_when_it_grows_and_never_runs_over() -> None:
    history = TokenHistory(4, CPU)
    for row in range(5):
        history.start(row, torch.tensor([row, 10 + row]))
    rows = torch.arange(5)
    assert history.read(rows, torch.full((5,), 1)).tolist() == [10, 11, 12, 13, 14]
    history.write(rows, torch.full((5,), 1 << 40), rows)  # a row that died long ago
    assert history.read(rows, torch.zeros(5, dtype=torch.int64)).tolist() == [0, 1, 2, 3, 4]
    assert history.read(rows, torch.full((5,), -1)).tolist() == [-1] * 5


def test_rows_that_ask_for_nothing_stage_nothing() -> None:
    def unheard(array: np.ndarray) -> torch.Tensor:
        raise AssertionError("something was staged")

    history = TokenHistory(1 << 20, CPU)
    wishes = HookWishes(3, 1 << 17, history, None)
    plain = SamplingParams(temperature=0.0)
    assert wishes.enter(Join(1, 0, NO_INTS, 1, 0, NO_INTS, plain, 0, 0)) is None
    assert wishes.group(np.array([1, 2]), unheard) is None
    single = SamplingParams(bad_word_ids=[[5]])
    assert wishes.enter(Join(2, 0, NO_INTS, 1, 0, NO_INTS, single, 0, 0)) is None
    assert not len(history.tokens_dev)


# --- a processor ----------------------------------------------------------------------------


def test_what_is_forbidden_stays_so_whatever_a_processor_does() -> None:
    params = SamplingParams(
        bad_word_ids=[[3], [4, 5]], allowed_token_ids=[3, 4, 5], extra_args={"any": 1}
    )
    history = TokenHistory(16, CPU)
    wishes = HookWishes(2, 8, history, load_processor("processors:Freeing", 8, CPU))
    place = wishes.enter(Join(1, 0, NO_INTS, 1, 0, NO_INTS, params, 0, 0))
    assert place is not None
    history.start(place, torch.tensor([2, 4]))
    group = wishes.group(np.array([1]), upload)
    assert group is not None
    logits = torch.zeros((1, 8))
    group.edit(logits, torch.tensor([2]), None)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("draft", ["", "ngram"])
@pytest.mark.parametrize("loop", ["serial", "overlap", "batch-queue"])
def test_an_error_of_a_processor_names_it_and_ends_who_asked(loop: str, draft: str) -> None:
    """Nobody else: the others get what they get alone; and a chunk that samples is a row too."""
    options = OPTIONS | {"logits_processor": "processors:Broken", "max_step_tokens": 8}
    plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    asking = msgspec.structs.replace(plain, extra_args={"at": 6})
    never = msgspec.structs.replace(plain, extra_args={"at": 1 << 40})
    asks = (
        Ask(0, (2, 3, 4), plain),
        Ask(0, (2, 3, 4, 7), asking),
        Ask(9, (5, 6, 7), never),
        Ask(9, tuple(range(2, 14)), asking),
        Ask(9, (3, 3, 3), plain),
    )
    variant = Variant(loop, draft=draft, drafts=2 if draft else 0)
    client = Client(toy_engine(options, variant), Workload(0, options, asks))
    told = client.play().told
    words = "the logits processor processors:Broken raised ValueError: I can't"
    for who in (1, 3):
        end = told[who, 0].finish
        assert end is not None
        assert (end.reason, end.error) == ("error", words)
    alone = play(Workload(0, OPTIONS, (asks[0], asks[4]))).told
    assert told[0, 0].tokens == alone[0, 0].tokens
    assert told[4, 0].tokens == alone[1, 0].tokens
    # under drafts it sees a length before the row has it
    begun = told[1, 0].tokens
    assert len(begun) <= 2 if draft else len(begun) == 2
    other = play(Workload(0, OPTIONS, (Ask(0, (2, 3, 4, 7), plain),))).told[0, 0]
    assert begun == other.tokens[: len(begun)]
    assert len(told[3, 0].tokens) == 0
    assert client.engine.failure is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Shy", "ModuleNotFoundError"),
        ("processors:NoSuch", "AttributeError"),
        ("processors:Nothing", "no method `apply"),
    ],
)
def test_a_processor_that_cannot_be_had_is_named_at_start(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        inline(resolved(OPTIONS | {"logits_processor": name}, Variant()))
    assert name in str(caught.value)


def test_arguments_for_a_processor_that_is_not_there_are_refused() -> None:
    engine = toy_engine(OPTIONS, Variant())
    with pytest.raises(InvalidParameter, match="there is none") as caught:
        engine.add([2, 3], SamplingParams(extra_args={"step": 1}))
    assert caught.value.param == "extra_args"
    engine.add([2, 3], SamplingParams(extra_args={}))  # asks for nothing
    engine.close()


def test_tokens_on_the_host_are_exact_in_every_loop_and_only_who_asks_waits() -> None:
    """The processor that reads them gives what brute force gives; and whoever waits for them is
    counted, by its own name."""
    syncs = SyncCounts()

    def play_counted(work: Workload, variant: Variant) -> Run:
        client = Client(toy_engine(work.options, variant), work)
        run = client.play()
        if variant.loop != "serial":
            for reason, found in client.engine.syncs.as_dict().items():
                syncs.add(SyncReason(reason), found["rows"])
        if not variant.draft:
            learn_from(run, work)
        return run

    counts: Counter[str] = Counter()
    for seed in range(600, 618):
        counts += check(seed, [variant_of(seed)], hooked_on_host, play_counted)[1]
    for seed in range(600, 603):
        for ask, told, answer in answers(hooked_on_host(seed)):
            hold(ask, told, answer)
    met = ("preemptions", "slot_reuses", "chunks", "drafts accepted")
    assert [name for name in met if not counts[name]] == []
    assert 0 < syncs.rows(SyncReason.HOST_PROCESSOR) < counts["launched_rows"] / 2
    assert not syncs.rows(SyncReason.GRAMMAR)


def test_the_runner_is_told_the_processors_name() -> None:
    settled = resolved(OPTIONS | {"logits_processor": "processors:Shy"}, Variant())
    assert runner_spec(settled).processor == "processors:Shy"
    loaded = load_processor("processors:Shy", 17, CPU)
    assert isinstance(loaded, Loaded)
    assert load_processor("", 17, CPU) is None
    assert play(Workload(0, OPTIONS, ())).steps == 0
