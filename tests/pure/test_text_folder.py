"""Hugging Face folders: what each file says, the bytes of tokens, and damaged files by name."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

import text_makers as makers
from stepahead.errors import InvalidParameter, ModelError, UnsupportedModel
from stepahead.text import Tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(makers.chat_folder(tmp_path_factory.mktemp("models") / "small-chat"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    return Tokenizer.load(makers.save_folder(folder, makers.sentencepiece_json()))


def load(folder: Path, spec: str | None = None, **files: object) -> Tokenizer:
    return Tokenizer.load(makers.save_folder(folder, spec or makers.byte_level_json(), **files))


# --- text to ids


@pytest.mark.parametrize("text", makers.TEXTS)
def test_text_survives_the_way_there_and_back(chat: Tokenizer, text: str) -> None:
    ids = chat.encode(text)
    assert ids == tokenizers.Tokenizer.from_str(makers.byte_level_json()).encode(text).ids
    assert chat.decode(ids, skip_special_tokens=False) == text


def test_what_the_folder_says(chat: Tokenizer) -> None:
    assert chat.name == "small-chat"
    assert chat.vocab_size == 500
    assert chat.bos_id == 1
    assert chat.eos_ids == (2, 0)  # the tokenizer's own first
    assert chat.special_ids == {0, 1, 2}
    assert chat.chat_template == makers.TEMPLATE


def test_a_chat_becomes_ids_with_nothing_added(chat: Tokenizer) -> None:
    ids = chat.encode_chat(makers.MESSAGES)
    assert chat.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n你好! How much is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [i for i in ids if i in chat.special_ids] == [1, 2, 1, 2, 1]
    without = chat.encode_chat(makers.MESSAGES, add_generation_prompt=False)
    assert ids[: len(without)] == without
    assert ids[len(without)] == 1


def test_a_chat_template_may_write_the_bos_itself(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        makers.with_bos(makers.byte_level_json(), "<|im_start|>"),
        tokenizer_config={"bos_token": "<|im_start|>"},
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    assert loaded.encode_chat([{"role": "user", "content": "hi"}]) == loaded.encode("hi")
    assert loaded.encode("hi")[0] == 1


def test_variables_reach_the_template(tmp_path: Path) -> None:
    loaded = load(tmp_path, chat_template="{{ 'think' if enable_thinking else 'answer' }}")
    hello = [{"role": "user", "content": "hi"}]
    assert loaded.decode(loaded.encode_chat(hello, enable_thinking=True)) == "think"
    assert loaded.decode(loaded.encode_chat(hello)) == "answer"


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_ids_of_its_library(chat: Tokenizer, special: bool) -> None:
    text = "".join(makers.TEXTS) * 8 + "<|im_start|>"
    assert len(text) > 5000
    wanted = chat._backend.encode(text, add_special_tokens=special).ids
    assert chat.encode(text, add_special_tokens=special) == wanted


def test_other_threads_run_while_a_long_text_is_read(chat: Tokenizer) -> None:
    # nobody is made to let the lock go: the other thread only runs if the library does by itself
    before_s, text, turns, over = sys.getswitchinterval(), makers.CORPUS[0] * 20_000, [0], [False]

    def turn() -> None:
        while not over[0]:
            turns[0] += 1
            time.sleep(0)

    sys.setswitchinterval(1000)
    other = threading.Thread(target=turn)
    try:
        other.start()
        began = turns[0]
        chat.encode(text)
        taken = turns[0] - began
    finally:
        over[0] = True
        sys.setswitchinterval(before_s)
        other.join()
    assert taken > 10  # it was none


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_a_prompt_that_is_no_text_is_refused(chat: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidParameter, match="prompt must be text") as caught:
        chat.encode(text)
    assert caught.value.param == "prompt"


def test_half_a_surrogate_pair_is_refused(chat: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="prompt holds half of a surrogate pair") as caught:
        chat.encode("a\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidParameter, match="prompt holds half of a surrogate pair"):
        chat.encode("a" * 5000 + "\ud83d")
    with pytest.raises(InvalidParameter, match="messages holds half") as caught:
        chat.encode_chat([{"role": "user", "content": "\ude00"}])
    assert caught.value.param == "messages"


def test_ids_past_the_vocabulary_stand_for_nothing(chat: Tokenizer) -> None:
    assert chat.decode([*chat.encode("a"), 500, 10**6, *chat.encode("b")]) == "ab"


# --- the files


@pytest.mark.parametrize("flag", [True, False])
def test_only_tokenizer_json_says_whether_a_bos_is_added(tmp_path: Path, flag: bool) -> None:
    # as transformers has it: the flag is for folders without a tokenizer.json
    config = {"bos_token": "<|im_start|>", "add_bos_token": flag}
    plain = load(tmp_path / "plain", tokenizer_config=config)
    spec = makers.with_bos(makers.byte_level_json(), "<|im_start|>")
    with_bos = load(tmp_path / "bos", spec, tokenizer_config=config)
    assert plain.encode("hi")[0] != 1
    assert with_bos.encode("hi") == [1, *plain.encode("hi")]
    assert with_bos.encode("hi", add_special_tokens=False) == plain.encode("hi")


def test_a_folder_with_nothing_but_the_tokenizer(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert (loaded.bos_id, loaded.eos_ids, loaded.chat_template) == (None, (), None)
    with pytest.raises(InvalidParameter, match="no chat template") as caught:
        loaded.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (2,)),
        ({"generation_config": {"eos_token_id": 0}}, (0,)),
        ({"generation_config": {"eos_token_id": [2, 0, 2]}}, (2, 0)),
        ({"config": {"eos_token_id": 7}}, (7,)),  # as transformers without a generation config
        ({"config": {"eos_token_id": 7}, "generation_config": {}}, ()),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        # the map counts unless the config lists every token itself
        (
            {
                "special_tokens_map": {"eos_token": "<|im_end|>"},
                "tokenizer_config": {"eos_token": "<|endoftext|>"},
            },
            (2,),
        ),
        (
            {
                "special_tokens_map": {"eos_token": "<|im_end|>"},
                "tokenizer_config": {"eos_token": "<|endoftext|>", "added_tokens_decoder": {}},
            },
            (0,),
        ),
        ({"tokenizer_config": {"eos_token": "not in the vocabulary"}}, ()),
        ({"tokenizer_config": {"eos_token": "\ud800"}}, ()),  # no text at all
    ],
)
def test_where_the_ends_come_from(
    tmp_path: Path, files: dict[str, object], eos_ids: tuple[int, ...]
) -> None:
    assert load(tmp_path, **files).eos_ids == eos_ids


def test_named_tokens_become_special_if_the_vocabulary_has_them(tmp_path: Path) -> None:
    spec = json.loads(makers.byte_level_json())
    spec["added_tokens"][2]["special"] = False
    spec["added_tokens"][1] |= {"special": False, "rstrip": True}
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",  # no model has an embedding for a token made up here
        "additional_special_tokens": ["<|im_start|>", {"content": "<gone>"}],
    }
    loaded = load(tmp_path, json.dumps(spec), tokenizer_config=config)
    assert loaded.special_ids == {0, 1, 2}
    assert loaded.decode([2, *loaded.encode("a")]) == "a"
    assert loaded.encode("<|im_start|>   a") == [1, *loaded.encode("a")]  # rstrip is kept
    assert loaded.vocab_size == 500
    assert max(loaded.encode("<pad><gone>")) < 500


def test_truncation_and_padding_of_the_training_are_left_out(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(makers.byte_level_json())
    made.enable_truncation(3)
    made.enable_padding(length=8)
    loaded = load(tmp_path, made.to_str())
    text = "the quick brown fox jumps over"
    assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded.encode("a")) == 1


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config": {"chat_template": "A"}, "chat_template": "B"}, "B"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({"tokenizer_config": {"chat_template": {"rag": "R"}}}, None),
        ({}, None),
    ],
)
def test_where_the_chat_template_comes_from(
    tmp_path: Path, files: dict[str, object], template: str | None
) -> None:
    folder = makers.save_folder(tmp_path, makers.byte_level_json(), **files)
    assert Tokenizer.load(folder).chat_template == template
    assert Tokenizer.load(folder, chat_template="mine").chat_template == "mine"
    assert Tokenizer.load(str(folder), chat_template="").chat_template == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BP'),
        ("tokenizer.json", b'{"model": {"type": "Morse"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b"\xff"),
        ("generation_config.json", b"{'eos': 1}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("special_tokens_map.json", b'{"a":' * 100_000),
        ("tokenizer_config.json", b'{"additional_special_tokens": 5}'),
        ("tokenizer_config.json", b'{"extra_special_tokens": "<a>"}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    makers.chat_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("entry", ["D", None, 5, {"name": "default"}, {"name": [], "template": ""}])
def test_a_list_of_chat_templates_that_is_none_is_refused(tmp_path: Path, entry: object) -> None:
    good = {"name": "default", "template": "D"}
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is a list, but"):
        load(tmp_path, tokenizer_config={"chat_template": [good, entry]})


def test_a_name_too_long_for_a_file_is_no_file() -> None:
    with pytest.raises(ModelError, match="xxx does not exist"):
        Tokenizer.load("x" * 5000)


def test_a_cut_off_tokenizer_json_is_refused(tmp_path: Path) -> None:
    file = makers.chat_folder(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be used: .*line"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"spm")
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json: .*save_pretrained"):
        Tokenizer.load(tmp_path)


# --- bytes of tokens


BYTE_LEVEL_IDS = st.lists(st.integers(0, 499), max_size=40)


@given(ids=BYTE_LEVEL_IDS)
@settings(max_examples=300, deadline=None)
def test_bytes_of_tokens_joined_are_the_decoded_text(chat: Tokenizer, ids: list[int]) -> None:
    joined = b"".join(chat.token_bytes[i] for i in ids)
    assert joined.decode("utf-8", "replace") == chat.decode(ids, skip_special_tokens=False)


def test_byte_level_bytes(chat: Tokenizer) -> None:
    assert len(chat.token_bytes) == 500
    assert chat.token_bytes[2] == b"<|im_end|>"
    assert {bytes([byte]) for byte in range(256)} <= set(chat.token_bytes)
    assert [chat.token_bytes[i] for i in chat.encode(" the")] == [b" the"]


def test_added_tokens_outside_the_byte_alphabet_are_plain_text(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(makers.byte_level_json())
    texts = ["<｜end▁of▁text｜>", "a b", "\t", "\xad"]
    made.add_special_tokens(texts)
    loaded = load(tmp_path, made.to_str())
    assert [piece.decode() for piece in loaded.token_bytes[500:]] == texts
    assert all(loaded.decode([500 + i], False) == text for i, text in enumerate(texts))


def test_a_gap_in_the_vocabulary_stands_for_nothing(tmp_path: Path) -> None:
    spec = json.loads(makers.byte_level_json())
    spec["model"]["vocab"]["gap"] = 510
    loaded = load(tmp_path, json.dumps(spec))
    assert loaded.vocab_size == 511
    assert loaded.token_bytes[500:] == [b""] * 10 + [b"gap"]


def test_sentencepiece_bytes(llama: Tokenizer) -> None:
    table = llama.token_bytes
    assert table[:3] == [b"<unk>", b"<s>", b"</s>"]
    assert table[3:259] == [bytes([byte]) for byte in range(256)]
    assert b" the" in table
    for text in makers.TEXTS:
        joined = b"".join(table[i] for i in llama.encode(text))
        assert joined.decode().removeprefix(" ") == text


def test_unigram_bytes(tmp_path: Path) -> None:
    loaded = load(tmp_path, makers.unigram_json())
    for text in makers.CORPUS[:2]:
        joined = b"".join(loaded.token_bytes[i] for i in loaded.encode(text))
        assert joined.decode() == " " + loaded.decode(loaded.encode(text))


def test_random_sentencepiece_tokens_joined_are_the_decoded_text(llama: Tokenizer) -> None:
    # byte tokens aside: a run of them that is no UTF-8 is decoded as one broken character a byte
    rng = random.Random(0)
    whole = [i for i, piece in enumerate(llama.token_bytes) if piece[-1:].isalpha() and i > 258]
    for _ in range(200):
        ids = rng.choices(whole, k=12)
        joined = b"".join(llama.token_bytes[i] for i in ids).decode()
        assert joined.removeprefix(" ") == llama.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "complaint"),
    [
        (None, "has no decoder"),
        (decoders.WordPiece(), "decoder WordPiece is not supported"),
        (decoders.Sequence([decoders.Fuse(), decoders.BPEDecoder()]), "decoder BPEDecoder is not"),
        (decoders.Replace(tokenizers.Regex("a+"), "b"), "decoder Replace is not supported"),
    ],
)
def test_decoders_that_are_not_bytes_in_a_row_are_refused(
    tmp_path: Path, decoder: decoders.Decoder | None, complaint: str
) -> None:
    spec = json.loads(makers.byte_level_json())
    spec["decoder"] = json.loads(decoder.__getstate__()) if decoder else None
    with pytest.raises(UnsupportedModel, match=complaint):
        load(tmp_path, json.dumps(spec))
