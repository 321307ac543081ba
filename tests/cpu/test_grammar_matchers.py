"""Where rows of a grammar stand: masks against a hand-made oracle, one advance a step, ends,
errors, rollback, drafts, a slot's next owner, memory."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grammars
import walks
from grammars import EOS, GAP, PAD
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.runner.grammar import Matchers, apply_masks
from stepahead.structured import Grammar, StructuredOutputs

VOCABULARY = grammars.tiny_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY)
IDS = {piece.decode(): token for token, piece in reversed(list(enumerate(VOCABULARY.token_bytes)))}


def regex(pattern: str) -> Grammar:
    return COMPILER.compile(StructuredOutputs(regex=pattern))


def make(*patterns: str) -> Matchers:
    """A row for each pattern, in slots 1.., of generation 0."""
    matchers = Matchers(VOCABULARY, len(patterns) + 1, threads=2)
    for slot, pattern in enumerate(patterns, 1):
        matchers.start(slot, 0, regex(pattern))
    return matchers


def allowed(matchers: Matchers, slot: int) -> set[int]:
    out = np.zeros((1, matchers.words), np.int32)
    matchers.fill([slot], out)
    return ones(out[0])


def ones(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(bits[: len(VOCABULARY.token_bytes)].nonzero()[0].tolist())


def advance(matchers: Matchers, step: int, slot: int, *texts: str, generation: int = 0) -> int:
    tokens = np.array([EOS if text == "<eos>" else IDS[text] for text in texts], np.int32)
    taken = matchers.advance(
        step, np.array([slot]), np.array([generation]), tokens, np.array([len(texts)])
    )
    return int(taken[0])


@settings(max_examples=80)
@given(st.lists(grammars.regexes(), min_size=1, max_size=4), st.data())
def test_a_token_is_allowed_iff_its_bytes_keep_the_text_a_prefix_of_the_language(
    languages: list[grammars.Regex], data: st.DataObject
) -> None:
    matchers = make(*(grammars.written(language) for language in languages))
    rest = dict(enumerate(languages, 1))
    out = np.zeros((len(languages), matchers.words), np.int32)
    for step in range(6):
        slots = sorted(rest)
        matchers.fill(slots, out)
        tokens: list[int] = []
        for place, slot in enumerate(slots):
            expected = {
                token
                for token, piece in enumerate(VOCABULARY.token_bytes)
                if token not in (PAD, EOS, GAP)
                and grammars.after_text(rest[slot], piece.decode()) != grammars.NOTHING
            }
            if grammars.takes_empty(rest[slot]):
                expected.add(EOS)
            assert ones(out[place]) == expected
            tokens.append(data.draw(st.sampled_from(sorted(expected))))
        matchers.advance(step, np.array(slots), np.zeros(len(slots)), np.array(tokens))
        assert matchers.take_errors() == []
        for slot, token in zip(slots, tokens, strict=True):
            if token == EOS:
                assert matchers.ended[slot]
                del rest[slot]
            else:
                rest[slot] = grammars.after_text(rest[slot], VOCABULARY.token_bytes[token].decode())
                # it may end early only where nothing but an end could follow
                assert not matchers.ended[slot] or rest[slot] == grammars.EMPTY
        if not rest:
            return


@settings(max_examples=30)
@given(st.lists(st.text('aé你😀"\\\n', max_size=5), min_size=1, max_size=6), st.data())
def test_a_choice_is_held_to_the_byte(choices: list[str], data: st.DataObject) -> None:
    pieces = sorted(
        {text.encode()[a:b] for text in choices for a in range(20) for b in range(a, 20)}
    )
    vocabulary = Vocabulary([b"<eos>", *(piece for piece in pieces if piece), b"\xff"], [0], [0])
    matchers = Matchers(vocabulary, 2, threads=1)
    asked = StructuredOutputs(choice=choices)
    matchers.start(1, 0, GrammarCompiler(vocabulary).compile(asked))
    texts, made, step = {text.encode() for text in choices}, b"", 0
    while True:
        out = np.zeros((1, matchers.words), np.int32)
        matchers.fill([1], out)
        bits = np.unpackbits(out[0].view(np.uint8), bitorder="little").nonzero()[0].tolist()
        expected = [0] if made in texts else []
        expected += [
            token
            for token, piece in enumerate(vocabulary.token_bytes)
            if token and any(text.startswith(made + piece) for text in texts)
        ]
        assert bits == sorted(expected)
        token = data.draw(st.sampled_from(expected))
        matchers.advance(step, np.array([1]), np.array([0]), np.array([token]))
        if token == 0:
            break
        made, step = made + vocabulary.token_bytes[token], step + 1
    assert made in texts
    assert matchers.ended[1]


def test_random_walks_under_schemas_parse_and_validate(tmp_path: Path) -> None:
    report = walks.walk(walks.small_vocabulary(tmp_path), 250)
    print(f"finished {report.finished} of 250, cut by max_tokens: {dict(report.cut)}")
    assert report.wrong == []
    assert report.finished >= 0.6 * 250
    assert report.finished + sum(report.cut.values()) == 250


def test_a_step_advances_once_however_often_its_barrier_is_called() -> None:
    matchers = make("aaa")
    for _ in range(3):
        assert advance(matchers, 5, 1, "a") == 1
    assert allowed(matchers, 1) == {IDS["a"], IDS["aa"]}
    assert advance(matchers, 6, 1, "aa") == 1
    assert matchers.ended[1]
    with pytest.raises(ValueError, match="step 5 lands after step 6"):
        advance(matchers, 5, 1, "a")


def test_a_row_of_an_owner_that_has_gone_advances_nobody() -> None:
    matchers = make("aaa")
    matchers.leave(1, 0)
    matchers.start(1, 1, regex("bb"))
    assert advance(matchers, 0, 1, "a", generation=0) == 0
    assert allowed(matchers, 1) == {IDS["b"], IDS["bb"]}
    matchers.leave(1, 0)  # late: it is another's slot by now
    assert advance(matchers, 1, 1, "bb", generation=1) == 1
    assert matchers.ended.tolist() == [False, True]
    matchers.start(1, 2, regex("a"))
    assert matchers.ended.tolist() == [False, False]


def test_an_accepted_run_is_taken_up_to_the_end_of_the_grammar() -> None:
    matchers = make("aab")
    assert advance(matchers, 0, 1, "a", "ab", "b", "b") == 2
    assert matchers.ended[1]
    assert allowed(matchers, 1) == {EOS}
    assert matchers.take_errors() == []


def test_rejected_drafts_are_rolled_back_even_across_the_end() -> None:
    matchers = make("ab|aab")
    assert advance(matchers, 0, 1, "a", "b") == 2
    assert matchers.ended[1]
    matchers.rollback(1, 1)
    assert not matchers.ended[1]
    assert allowed(matchers, 1) == {IDS["b"], IDS["a"], IDS["ab"]} | {
        token for token, piece in enumerate(VOCABULARY.token_bytes) if piece == b"ab"
    }
    matchers.rollback(1, 1)
    assert advance(matchers, 1, 1, "a", "a", "b", "<eos>") == 3
    matchers.rollback(2, 3)  # nobody's slot: nothing happens


def test_masks_along_drafts_are_those_of_walking_there_and_no_state_changes() -> None:
    patterns = ["(ab)*", "a{0,9}", "b?", "0"]
    drafts = [["a", "b", "ab", "0"], ["aaa", "a"], [], ["a", "0"]]
    matchers = make(*patterns)
    runs = [[IDS[text] for text in run] for run in drafts]
    out = np.zeros((sum(1 + len(run) for run in runs) + 5, matchers.words), np.int32)
    assert matchers.fill_drafts([1, 2, 3, 4], runs, out) == [3, 2, 0, 0]
    first = 0
    for pattern, run, legal in zip(patterns, drafts, [3, 2, 0, 0], strict=True):
        alone = make(pattern)
        for step in range(legal + 1):
            assert ones(out[first + step]) == allowed(alone, 1)
            if step < legal:
                advance(alone, step, 1, run[step])
        for behind in range(legal + 1, len(run) + 1):
            assert (out[first + behind] == -1).all()
        first += 1 + len(run)
    assert allowed(matchers, 1) == allowed(make(patterns[0]), 1)


def test_a_token_that_is_not_allowed_fails_its_row_alone_and_once() -> None:
    matchers = make("aaa", "aaa")
    slots = np.array([1, 2])
    taken = matchers.advance(0, slots, np.zeros(2), np.array([IDS["b"], IDS["a"]]))
    assert taken.tolist() == [0, 1]
    (error,) = matchers.take_errors()
    assert (error.slot, error.generation) == (1, 0)
    assert "is not allowed" in error.reason
    assert matchers.take_errors() == []
    assert matchers.ended.tolist() == [False, True, False]
    out = np.zeros((2, matchers.words), np.int32)
    matchers.fill([1, 2], out)
    assert ones(out[0]) == {EOS}  # something can be sampled, and nobody hears it
    assert ones(out[1]) == {IDS["a"], IDS["aa"]}
    assert matchers.take_errors() == []


def test_a_dead_end_is_an_error_of_its_row_and_no_end_of_an_answer() -> None:
    # after "a" the rule goes on for ever without a letter
    dead = Grammar('start: "a" dead | "bb"\ndead: dead "b"\n%llguidance {"no_forcing": true}\n')
    matchers = make("aa")
    matchers.start(1, 7, dead)
    assert IDS["a"] in allowed(matchers, 1)
    advance(matchers, 0, 1, "a", generation=7)
    assert allowed(matchers, 1) == {EOS}
    (error,) = matchers.take_errors()
    assert (error.slot, error.generation) == (1, 7)
    assert "can't go on" in error.reason
    matchers.start(1, 8, Grammar("no grammar"))
    (error,) = matchers.take_errors()
    assert (error.slot, error.generation) == (1, 8)
    assert matchers.ended[1]


def test_a_mask_that_takes_too_long_is_an_error_of_its_row() -> None:
    """Each rule is one or two of the next: the parser has more to do with every letter."""
    rules = "".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}\n" for i in range(60))
    grammar = Grammar(f'start: a0\n{rules}a60: "a"\n%llguidance {{"no_forcing": true}}\n')
    matchers = make("a", "a")
    matchers.start(1, 7, grammar)
    matchers.start(2, 0, regex("a*"))
    for step in range(30):
        allowed(matchers, 1)
        if errors := matchers.take_errors():
            break
        advance(matchers, step, 1, "a", generation=7)
    assert [error.slot for error in errors] == [1]
    assert "Too many items" in errors[0].reason
    assert IDS["a"] in allowed(matchers, 2)


def test_slots_without_a_grammar_may_have_any_token_and_take_all() -> None:
    matchers = make("a")
    out = np.zeros((2, matchers.words), np.int32)
    matchers.fill([0, 1], out)
    assert (out[0] == -1).all()
    assert ones(out[1]) == {IDS["a"]}
    taken = matchers.advance(0, np.array([0, 1]), np.zeros(2), np.array([IDS["b"], IDS["a"]]))
    assert taken.tolist() == [1, 1]


def test_every_end_of_sequence_of_the_model_may_end_an_answer() -> None:
    vocabulary = Vocabulary([b"<x>", b"<y>", b"a"], [0, 1], [1, 0])
    matchers = Matchers(vocabulary, 2, threads=1)
    matchers.start(1, 0, GrammarCompiler(vocabulary).compile(StructuredOutputs(regex="a?")))
    out = np.zeros((1, 1), np.int32)
    matchers.fill([1], out)
    assert out[0, 0] & 7 == 0b111
    matchers.advance(0, np.array([1]), np.array([0]), np.array([0]))
    assert matchers.ended[1]


def test_masks_that_do_not_fit_are_refused() -> None:
    matchers = make("a")
    for bad in (
        np.zeros((0, matchers.words), np.int32),
        np.zeros((1, matchers.words + 1), np.int32),
        np.zeros((1, matchers.words), np.int64),
        np.zeros((2, 2 * matchers.words), np.int32)[:, ::2],
    ):
        with pytest.raises(ValueError, match="masks of 1 rows want"):
            matchers.fill([1], bad)


def test_apply_masks_forbids_exactly_the_zeros() -> None:
    noise = np.random.default_rng(0)
    for vocab in (1, 31, 32, 33, 100):
        words = (vocab + 31) // 32
        masks = noise.integers(-(2**31), 2**31, (3, words)).astype(np.int32)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little", axis=1)[:, :vocab] == 1
        before = torch.randn(3, vocab)
        expected = before.masked_fill(torch.from_numpy(~bits), -torch.inf)
        logits = before.clone()
        apply_masks(logits, torch.from_numpy(masks))
        assert torch.equal(logits, expected)
        rows = torch.tensor([2, 0])
        logits = before.clone()
        apply_masks(logits, torch.from_numpy(masks[[2, 0]]), rows)
        assert torch.equal(logits[rows], expected[rows])
        assert torch.equal(logits[1], before[1])
    with pytest.raises(ValueError, match="masks of 1 words for 33 logits"):
        apply_masks(torch.zeros(1, 33), torch.zeros(1, 1, dtype=torch.int32))


def test_a_forbidden_logit_that_is_no_number_is_forbidden() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0], [torch.inf, -torch.inf, -0.0]])
    apply_masks(logits, torch.tensor([[0b010], [0b110]], dtype=torch.int32))
    assert logits.tolist() == [[-torch.inf, 1.0, -torch.inf], [-torch.inf, -torch.inf, 0.0]]
    assert logits[1, 2].signbit()


def test_memory_stays_flat_over_two_thousand_fills(tmp_path: Path) -> None:
    vocabulary = walks.small_vocabulary(tmp_path)
    compiler, matchers = GrammarCompiler(vocabulary), Matchers(vocabulary, 3, threads=1)
    grammar = compiler.compile(StructuredOutputs(json=walks.SCHEMAS["object of objects"]))
    out, noise = np.zeros((2, matchers.words), np.int32), np.random.default_rng(0)
    slots, resident = np.array([1, 2]), []
    generations = np.array([0, 0])
    for slot in slots.tolist():
        matchers.start(slot, 0, grammar)
    for step in range(2500):
        matchers.fill([1, 2], out)
        bits = np.unpackbits(out.view(np.uint8), bitorder="little", axis=1)
        tokens = np.array([noise.choice(row.nonzero()[0]) for row in bits])
        matchers.advance(step, slots, generations, tokens)
        for place, slot in enumerate(slots.tolist()):
            if matchers.ended[slot]:
                matchers.leave(slot, int(generations[place]))
                generations[place] += 1
                matchers.start(slot, int(generations[place]), grammar)
        if step % 500 == 499:
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    print(f"resident MB: {[value >> 20 for value in resident]}; owners: {generations.tolist()}")
    assert generations.min() > 10
    assert resident[-1] - resident[0] < 8 << 20  # one mask is 64 bytes, one row's state some 100 kB


def test_a_fill_lets_other_threads_run(tmp_path: Path) -> None:
    """With a switch interval of 1,000 s a thread runs only when the one that runs lets it."""
    vocabulary = walks.small_vocabulary(tmp_path)
    matchers = Matchers(vocabulary, 9, threads=1)
    grammar = GrammarCompiler(vocabulary).compile(StructuredOutputs(json=walks.SCHEMAS["order"]))
    for slot in range(1, 9):
        matchers.start(slot, 0, grammar)
    out = np.zeros((8, matchers.words), np.int32)
    turns, stop, before = [0], threading.Event(), sys.getswitchinterval()

    def beside() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        began = turns[0]
        sum(range(1_000_000))  # lets nobody in, or the test would prove nothing
        assert turns[0] == began
        for _ in range(20_000):
            matchers.fill(range(1, 9), out)
            if turns[0] > began:
                break
        assert turns[0] > began
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()
