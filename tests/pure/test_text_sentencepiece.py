"""What our tokenizers make of a GGUF file's scores is what sentencepiece itself makes of them."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

import stepahead
import text_makers as makers
from stepahead.text.tokenizer import Tokenizer

OURS = ("▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n", "\t", "<b>")  # as Gemma has them: never put together
CORPUS = Path(stepahead.__file__).parent / "runner" / "runner.py"
PIECES = st.sampled_from(
    [" ", "  ", "\n", "\t", "the ", "page", "plan", "<b>", "é", "步", "😀", "x"]
)


def trained(dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    lines = [line for line in CORPUS.read_text(encoding="utf-8").splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        user_defined_symbols=list(OURS),
        normalization_rule_name="identity",
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def kind(origin: sentencepiece.SentencePieceProcessor, index: int) -> gguf.TokenType:
    if origin.is_unknown(index):
        return gguf.TokenType.UNKNOWN
    if origin.is_control(index):
        return gguf.TokenType.CONTROL
    if origin.is_byte(index):
        return gguf.TokenType.BYTE
    defined = origin.id_to_piece(index) in OURS
    return gguf.TokenType.USER_DEFINED if defined else gguf.TokenType.NORMAL


def converted(origin: sentencepiece.SentencePieceProcessor, path: Path, prefix: bool) -> Tokenizer:
    """As llama.cpp's converter does it: the user's own pieces with plain spaces."""
    count = origin.get_piece_size()
    pieces = [origin.id_to_piece(index) for index in range(count)]
    writer = makers.new_gguf(path)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([p.replace("▁", " ") if p in OURS else p for p in pieces])
    writer.add_token_scores([origin.get_score(index) for index in range(count)])
    writer.add_token_types([kind(origin, index) for index in range(count)])
    return Tokenizer.load(makers.close_gguf(writer, path, {"add_space_prefix": prefix}))


@pytest.fixture(scope="module")
def gemma_like(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    origin = trained(dummy_prefix=False)
    return origin, converted(origin, tmp_path_factory.mktemp("sp") / "m.gguf", prefix=False)


@given(text=st.lists(PIECES, max_size=12).map("".join))
@example(text="two  spaces   three\n\n\nlines\t\tx <b>bold")
@example(text="plan n launches, the host retires; 1/S of 𝛼 ≥ β")
def test_scores_are_the_order_that_sentencepiece_merges_in(
    gemma_like: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str
) -> None:
    origin, loaded = gemma_like
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == origin.encode(text)
    assert loaded.decode(ids) == text


def test_a_whole_text_as_sentencepiece_has_it(
    gemma_like: tuple[sentencepiece.SentencePieceProcessor, Tokenizer],
) -> None:
    origin, loaded = gemma_like
    text = (CORPUS.parent / "stage.py").read_text(encoding="utf-8")
    assert loaded.encode(text, add_special_tokens=False) == origin.encode(text)


def test_a_text_with_the_space_before_it(tmp_path: Path) -> None:
    origin = trained(dummy_prefix=True)
    loaded = converted(origin, tmp_path / "m.gguf", prefix=True)
    for text in ("the host plans", "x", "é步"):
        assert loaded.encode(text, add_special_tokens=False) == origin.encode(text)
