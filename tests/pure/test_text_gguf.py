"""GGUF files: metadata read without tensors, known pre-tokenizers exact, the rest refused."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import gguf
import pytest
import tokenizers

import text_makers as makers
from stepahead.errors import ModelError, UnsupportedModel
from stepahead.text import Tokenizer
from stepahead.text.gguf_metadata import read_metadata
from stepahead.text.gguf_tokenizer import PRE_TOKENIZERS, load_gguf


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return makers.save_gguf(
        tmp_path / "small.gguf",
        makers.byte_level_json(),
        bos_token_id=1,
        eos_token_id=2,
        chat_template=makers.TEMPLATE,
    )


def cut(path: Path, text: str) -> list[str]:
    return list(makers.pieces(load_gguf(path).backend, text))


# --- metadata


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "u8": (writer.add_uint8, 200),
        "i8": (writer.add_int8, -100),
        "u16": (writer.add_uint16, 60000),
        "i16": (writer.add_int16, -30000),
        "u32": (writer.add_uint32, 4_000_000_000),
        "i32": (writer.add_int32, -2_000_000_000),
        "f32": (writer.add_float32, 0.5),
        "u64": (writer.add_uint64, 2**63),
        "i64": (writer.add_int64, -(2**62)),
        "f64": (writer.add_float64, 0.1),
        "yes": (writer.add_bool, True),
        "text": (writer.add_string, "é你😀"),
        "texts": (writer.add_array, ["", "a", "▁b"]),
        "numbers": (writer.add_array, [1, -2, 3]),
        "floats": (writer.add_array, [0.5, -0.25]),
        "flags": (writer.add_array, [True, False]),
    }
    for key, (add, value) in values.items():
        add(key, value)
    makers.close_gguf(writer, path, {})
    expected = {"general.architecture": "llama"} | {key: v for key, (_, v) in values.items()}
    assert read_metadata(path) == expected


@pytest.fixture(scope="module")
def reader() -> tuple[gguf.GGUFReader, float]:
    """The gguf package's, of the real file, and the seconds it took this thread's CPU."""
    path, began_s = makers.smollm2(), time.thread_time()
    return gguf.GGUFReader(path), time.thread_time() - began_s


def test_metadata_equals_the_gguf_packages(reader: tuple[gguf.GGUFReader, float]) -> None:
    ours = read_metadata(makers.smollm2())
    fields = reader[0].fields
    theirs = {key: f.contents() for key, f in fields.items() if not key.startswith("GGUF.")}
    assert len(theirs) == 33
    assert ours == theirs


@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.99])
def test_a_file_cut_off_in_its_metadata_says_where(small: Path, part: float) -> None:
    whole = small.read_bytes()
    small.write_bytes(whole[: 24 + int((len(whole) - 64) * part)])
    with pytest.raises(
        ModelError, match=r"small\.gguf is cut off: it ends inside .*after [\d,]+ b"
    ):
        Tokenizer.load(small)


def test_every_cut_is_seen(small: Path) -> None:
    # any length below the metadata's: never an index error, a struct error or a short vocabulary
    path = makers.save_gguf(
        small.with_name("tiny.gguf"),
        json.dumps({"model": {"vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": []}),
    )
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut off|not a GGUF"):
            read_metadata(path)


@pytest.mark.parametrize("start", [b"", b"GG", b"PK\x03\x04" + bytes(60), bytes(64)])
def test_what_is_no_gguf_is_refused(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with pytest.raises(UnsupportedModel, match=r"model\.gguf is not a GGUF file"):
        Tokenizer.load(path)


def test_other_versions_are_refused(small: Path) -> None:
    whole = small.read_bytes()
    for version in (1, 4, 3 << 24):  # the last is 3 in big-endian order
        small.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        with pytest.raises(UnsupportedModel, match=f"GGUF version {version} or big-endian"):
            Tokenizer.load(small)


def test_damaged_metadata_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    path = tmp_path / "bad.gguf"
    for tail, complaint in [
        (struct.pack("<IIQ", 9, 4, 2**62), "cut off"),  # an array of 2**62 numbers
        (struct.pack("<IIQ", 9, 8, 2**62), "cut off"),  # ... of strings
        (struct.pack("<IQ", 8, 2**62), "cut off"),  # a string of 2**62 bytes
        (struct.pack("<I", 77), "k has the unknown type 77"),
        (struct.pack("<IIQ", 9, 9, 1), "k has the unknown type 9"),  # an array of arrays
        (struct.pack("<IQ", 8, 2) + b"\xff\xff", "k is not UTF-8"),
    ]:
        path.write_bytes(head + tail)
        with pytest.raises(ModelError, match=complaint):
            read_metadata(path)


@pytest.mark.parametrize(
    ("count", "rest"),
    [
        (1 << 62, b""),
        (1 << 22, b""),
        (1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 7_000_000)),
        (1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 60_000_000)),
        (2, (struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)) * 2),
    ],
)
def test_damaged_counts_cost_no_walk_through_the_file(
    tmp_path: Path, count: int, rest: bytes
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, count) + rest)
    os.truncate(path, 1 << 26)  # zeros behind it: keys and strings of no length
    began_s = time.thread_time()
    with pytest.raises(ModelError, match=r"damaged\.gguf"):
        read_metadata(path)
    assert time.thread_time() - began_s < 0.3


def test_a_folder_where_a_file_should_be_and_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf does not exist"):
        Tokenizer.load(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelError, match="can't be read: Is a directory"):
        read_metadata(tmp_path)


# --- byte-level vocabularies


@pytest.mark.parametrize("text", makers.TEXTS)
def test_a_gguf_tokenizer_equals_the_one_it_was_made_from(small: Path, text: str) -> None:
    origin = tokenizers.Tokenizer.from_str(makers.byte_level_json())
    loaded = Tokenizer.load(small)
    ids = loaded.encode(text)
    assert ids == origin.encode(text).ids
    assert loaded.decode(ids, skip_special_tokens=False) == text


def test_what_the_file_says_about_special_tokens(small: Path) -> None:
    loaded = Tokenizer.load(small)
    assert loaded.name == "small"
    assert (loaded.bos_id, loaded.eos_ids) == (1, (2,))
    assert loaded.special_ids == {0, 1, 2}
    assert loaded.vocab_size == 500
    assert loaded.encode("<|im_start|>") == [1]
    assert loaded.decode([1, 2]) == ""
    assert loaded.token_bytes[1] == b"<|im_start|>"
    assert loaded.encode_chat(makers.MESSAGES)[:1] == [1]
    assert loaded.encode_chat(makers.MESSAGES).count(2) == 2


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("smollm", {}, False),
        ("smollm", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),  # as the pre-tokenizer's models want it
        ("llama-bpe", {"add_bos_token": False}, False),
        ("tekken", {}, True),
        ("qwen2", {}, False),
    ],
)
def test_a_bos_is_added_as_the_file_says_else_as_the_pre_tokenizer_wants(
    tmp_path: Path, pre: str, said: dict[str, bool], adds: bool
) -> None:
    path = makers.save_gguf(
        tmp_path / "m.gguf", makers.byte_level_json(), pre=pre, bos_token_id=1, **said
    )
    loaded = Tokenizer.load(path)
    plain = loaded.encode("hi", add_special_tokens=False)
    assert loaded.encode("hi") == ([1, *plain] if adds else plain)
    assert loaded.encode("") == ([1] if adds else [])


def test_an_eos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = makers.save_gguf(
        tmp_path / "m.gguf",
        makers.byte_level_json(),
        bos_token_id=1,
        eos_token_id=2,
        add_eos_token=True,
    )
    loaded = Tokenizer.load(path)
    assert loaded.encode("hi") == [*loaded.encode("hi", add_special_tokens=False), 2]


def test_every_end_the_file_names_is_an_eos(tmp_path: Path) -> None:
    path = makers.save_gguf(
        tmp_path / "m.gguf",
        makers.byte_level_json(),
        eos_token_id=2,
        eot_token_id=0,
        eom_token_id=2,
    )
    assert Tokenizer.load(path).eos_ids == (2, 0)


def test_user_defined_tokens_stay_whole_but_are_shown(tmp_path: Path) -> None:
    spec = json.loads(makers.byte_level_json())
    spec["added_tokens"][0]["special"] = False
    loaded = Tokenizer.load(makers.save_gguf(tmp_path / "m.gguf", json.dumps(spec)))
    assert loaded.encode("a<|endoftext|>b")[1] == 0
    assert loaded.decode([0]) == "<|endoftext|>"
    assert loaded.special_ids == {1, 2}


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = makers.save_gguf(tmp_path / "m.gguf", makers.byte_level_json(), eos_token_id=500)
    with pytest.raises(ModelError, match=r"eos_token_id is 500, not a token id below 500"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("vocab", "merges", "complaint"),
    [
        ({"a": 0, "b": 1}, [["a", "zz"]], r"vocabulary can't be used: .*zz"),
        ({"a": 0, "b": 1}, [["ab", ""]], r"vocabulary can't be used"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    tmp_path: Path, vocab: dict[str, int], merges: list[list[str]], complaint: str
) -> None:
    spec = {"model": {"vocab": vocab, "merges": merges}, "added_tokens": []}
    with pytest.raises(ModelError, match=complaint):
        Tokenizer.load(makers.save_gguf(tmp_path / "m.gguf", json.dumps(spec)))


def raw_vocabulary(path: Path, model: str, **arrays: list[str] | list[int]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("gpt-2")
    for key, values in arrays.items():
        writer.add_array(f"tokenizer.ggml.{key}", values)
    return makers.close_gguf(writer, path, {})


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({}, r"has no tokenizer\.ggml\.tokens: if the model is split over several files"),
        ({"tokens": ["a", "b"]}, r"has no tokenizer\.ggml\.merges"),
        ({"tokens": ["a", "a"], "merges": ["a a"]}, "token 'a' is in the vocabulary twice"),
        ({"tokens": ["a"], "merges": ["a"], "token_type": [1, 1]}, "2 token types for 1 tokens"),
        ({"tokens": ["a", "aa", "aaa"], "merges": ["aa"]}, "merge 'aa' does not name two tokens"),
    ],
)
def test_missing_or_unequal_arrays_are_named(
    tmp_path: Path, arrays: dict[str, list[str]], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        Tokenizer.load(raw_vocabulary(tmp_path / "m.gguf", "gpt2", **arrays))


# --- pre-tokenizers by name


def test_unknown_pre_tokenizers_are_refused_and_the_known_ones_listed(tmp_path: Path) -> None:
    path = makers.save_gguf(tmp_path / "m.gguf", makers.byte_level_json(), pre="viking")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre 'viking'") as caught:
        Tokenizer.load(path)
    assert all(name in str(caught.value) for name in PRE_TOKENIZERS)
    assert str(path) in str(caught.value)


def test_unknown_vocabularies_are_refused(tmp_path: Path) -> None:
    path = raw_vocabulary(tmp_path / "m.gguf", "t5", tokens=["a"])
    with pytest.raises(UnsupportedModel, match=r"ggml\.model 't5' is not supported, only gpt2, ll"):
        Tokenizer.load(path)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_pre_tokenizer_loses_text(tmp_path: Path, pre: str) -> None:
    path = makers.save_gguf(tmp_path / "m.gguf", makers.byte_level_json(), pre=pre)
    loaded = Tokenizer.load(path)
    for text in makers.TEXTS:
        shown = loaded.decode(loaded.encode(text), skip_special_tokens=False)
        composed = text.replace("a\u0301", "á") if "qwen" in pre else text
        assert shown == composed


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll  pay 123", ["I", "'ll", " ", " pay", " 123"]),
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
        # whitespace before a digit stays in one piece: the digit is cut off first
        ("smollm", "a   12", ["a", "   ", "1", "2"]),
        ("smollm", "x\n\n3", ["x", "\n\n", "3"]),
        ("refact", "v2.10", ["v", "2", ".", "1", "0"]),
        ("llama-bpe", "I'LL pay  1234", ["I", "'LL", " pay", " ", " ", "123", "4"]),
        ("llama-bpe", "a!\n\nb", ["a", "!\n\n", "b"]),
        ("qwen2", "I'LL pay 1234", ["I", "'LL", " pay", " ", "1", "2", "3", "4"]),
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),
        ("qwen35", "नमस्ते", ["नमस्ते"]),
        ("tekken", "HelloWorld FOOBar 12/\n", ["Hello", "World", " FOOBar", " ", "1", "2", "/\n"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("glm4", "1234 ok", ["123", "4", " ok"]),
        ("deepseek-v3", "x12345 你好ok", ["x", "123", "45", " ", "你好", "ok"]),
        ("deepseek-coder", "ab, 12\n 你好", ["ab", ",", " ", "1", "2", "\n", " ", "你好"]),
        # llama.cpp's own: punctuation first, then GPT-2's, then digits by three
        ("default", "a+b is 12345", ["a", "+", "b", " is", " ", "123", "45"]),
    ],
)
def test_text_is_cut_as_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    path = makers.save_gguf(tmp_path / "m.gguf", makers.byte_level_json(), pre=pre)
    assert cut(path, text) == expected


def test_whole_words_go_before_merges(tmp_path: Path) -> None:
    # Llama 3 has words that no merges lead to; its tokenizer.json says ignore_merges
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    spec = json.dumps({"model": {"vocab": vocab, "merges": [["a", "b"]]}, "added_tokens": []})
    llama = Tokenizer.load(makers.save_gguf(tmp_path / "l.gguf", spec, pre="llama-bpe"))
    gpt2 = Tokenizer.load(makers.save_gguf(tmp_path / "g.gguf", spec, pre="gpt-2"))
    assert llama.encode("abc") == [4]
    assert gpt2.encode("abc") == [3, 2]


# --- sentencepiece-like vocabularies


@pytest.mark.parametrize("text", makers.TEXTS)
def test_scores_give_back_the_merges(tmp_path: Path, text: str) -> None:
    spec = makers.sentencepiece_json()
    origin = tokenizers.Tokenizer.from_str(spec)
    loaded = Tokenizer.load(makers.save_sentencepiece_gguf(tmp_path / "m.gguf", spec))
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == origin.encode(text).ids
    assert loaded.encode(text) == [1, *ids]
    assert loaded.decode(ids) == text


def test_sentencepiece_defaults_are_llama_cpps(tmp_path: Path) -> None:
    path = makers.save_sentencepiece_gguf(tmp_path / "m.gguf", makers.sentencepiece_json())
    loaded = Tokenizer.load(path)
    assert (loaded.bos_id, loaded.eos_ids, loaded.special_ids) == (1, (2,), {0, 1, 2})
    # a space goes before every stretch of text, also after a special token
    the = loaded.encode("the", add_special_tokens=False)
    assert loaded.encode("the</s>the", add_special_tokens=False) == [*the, 2, *the]
    assert loaded.encode("☃", add_special_tokens=False)[-3:] == [
        loaded.token_bytes.index(bytes([byte]), 3) for byte in "☃".encode()
    ]


def test_no_space_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = makers.save_sentencepiece_gguf(
        tmp_path / "m.gguf",
        makers.sentencepiece_json(),
        add_space_prefix=False,
        add_bos_token=False,
    )
    loaded = Tokenizer.load(path)
    assert loaded.decode(loaded.encode("the fox")) == "the fox"
    assert loaded.decode(loaded.encode(" the fox")) == " the fox"
    assert loaded.encode("the fox") != loaded.encode(" the fox")


# --- the real one


def test_the_real_tokenizer_loads_fast(reader: tuple[gguf.GGUFReader, float]) -> None:
    path = makers.smollm2()
    times_s = []
    for _ in range(3):
        start = time.thread_time()
        loaded = Tokenizer.load(path)
        times_s.append(time.thread_time() - start)
    # measured: a 17th of what the gguf package's reader alone takes
    assert min(times_s) < reader[1] / 3
    assert loaded.vocab_size == 49152
    assert loaded.eos_ids == (2,)


def test_the_real_tokenizer_on_what_it_was_trained_to_see() -> None:
    loaded = Tokenizer.load(makers.smollm2())
    # no token mixes a digit with anything: its training cut every digit off first
    digits = [piece for piece in loaded.token_bytes if any(c in b"0123456789" for c in piece)]
    assert sorted(digits) == [b"%d" % digit for digit in range(10)]
    # so whitespace before a digit is one token, where GPT-2's split alone would give two
    assert [loaded.token_bytes[i] for i in loaded.encode("a\n\n12")] == [b"a", b"\n\n", b"1", b"2"]
    prompt = loaded.decode(loaded.encode_chat(makers.MESSAGES), skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n你好! How much is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    )
