"""Builds a tokenizer from a GGUF file's metadata.  Knows llama.cpp's keys, no tensors.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it.  The table
below says what each name stands for, after llama.cpp's table of regexes and, where they differ or
llama.cpp approximates, the model's original tokenizer.json.  A name that is not in the table is
refused: a wrong split gives wrong ids, and a model that answers worse without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from stepahead.errors import ModelError, UnsupportedModel
from stepahead.text.gguf_metadata import Value, read_metadata
from stepahead.text.parts import Parts

if TYPE_CHECKING:
    import tokenizers


class Pre(NamedTuple):
    """How a byte-level vocabulary wants its text cut before merging."""

    splits: tuple[str, ...] = ()  # regexes, each cutting what the one before left
    single_digits: bool = False  # every digit alone, before anything else
    gpt2_split: bool = False  # GPT-2's regex, built into the byte-level step
    nfc: bool = False  # characters composed first
    whole_words: bool = False  # a word that is a token is one, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


# GPT-2's regex is needed by itself only where something must cut after it.
_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CAMEL_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_SPLIT: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}{_CAMEL_TAIL}"
)
_GPT4O_SPLIT: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    rf"|\p{{N}}{{1,3}}{_CAMEL_TAIL}"
)
_DEEPSEEK_V3_SPLITS: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER_SPLITS: Final = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
# llama.cpp's own guess for a vocabulary that its converter did not recognise
_DEFAULT_SPLITS: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")

_GPT2: Final = Pre(gpt2_split=True)
_SINGLE_DIGITS: Final = Pre(single_digits=True, gpt2_split=True)
_LLAMA3: Final = Pre((_LLAMA3_SPLIT,), whole_words=True, add_bos=True)
_CL100K: Final = Pre((_LLAMA3_SPLIT,))
_QWEN2: Final = Pre((_QWEN2_SPLIT,), nfc=True)
_GPT4O: Final = Pre((_GPT4O_SPLIT,))

PRE_TOKENIZERS: Final[Mapping[str, Pre]] = {
    "default": Pre(_DEFAULT_SPLITS),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "trillion": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Pre((_QWEN35_SPLIT,), nfc=True),
    "tekken": Pre((_TEKKEN_SPLIT,), whole_words=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-v3": Pre(_DEEPSEEK_V3_SPLITS),
    "deepseek-coder": Pre(_DEEPSEEK_CODER_SPLITS),
}

# token_type values
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_BYTE: Final = 6


def load_gguf(path: Path) -> Parts:
    """The tokenizer that the file describes.

    Raises UnsupportedModel for a kind of vocabulary or a pre-tokenizer that is not known,
    ModelError if the file is damaged or its vocabulary contradicts itself.
    """
    meta = _Metadata(path, read_metadata(path))
    builders: dict[str, Callable[[_Metadata], _Built]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    kind = meta.text("tokenizer.ggml.model")
    if kind not in builders:
        raise UnsupportedModel(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported, only {_listed(builders)}; "
            "use the model's Hugging Face folder"
        )
    try:
        built = builders[kind](meta)
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # the library's own: a merge of tokens that are not there, say
        raise ModelError(f"{path}: its vocabulary can't be used: {error}") from error
    return _finished(meta, built)


class _Built(NamedTuple):
    backend: tokenizers.Tokenizer
    add_bos: bool
    default_ids: Mapping[str, int]  # of special tokens, where the file names none


class _Metadata:
    """The file's keys, asked for by type."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values
        self.tokens = self.texts("tokenizer.ggml.tokens")
        self.types = self._types()

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        return value if isinstance(value, str) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        return value if isinstance(value, bool) else default

    def index(self, key: str) -> int | None:
        """A token id; ModelError if it is none of this vocabulary."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelError(
                f"{self.path}: {key} is {value!r}, not a token id below {len(self.tokens)}"
            )
        return value

    def has(self, key: str) -> bool:
        return key in self._values

    def texts(self, key: str) -> list[str]:
        values = self._array(key)
        return [value for value in values if isinstance(value, str)]

    def numbers(self, key: str) -> list[float]:
        values = self._array(key)
        return [value for value in values if isinstance(value, int | float)]

    def _array(self, key: str) -> list[str] | list[int] | list[float] | list[bool]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise ModelError(
                f"{self.path} has no {key}: if the model is split over several files name the "
                "first, else use the model's Hugging Face folder"
            )
        return value

    def _types(self) -> list[int]:
        if not self.has("tokenizer.ggml.token_type"):
            return [0] * len(self.tokens)
        types = [int(kind) for kind in self.numbers("tokenizer.ggml.token_type")]
        if len(types) != len(self.tokens):
            raise ModelError(
                f"{self.path}: {len(types)} token types for {len(self.tokens)} tokens; "
                "the file is damaged, fetch it again"
            )
        return types


def _vocabulary(meta: _Metadata) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(meta.tokens)}
    if len(ids) != len(meta.tokens):
        twice = next(token for index, token in enumerate(meta.tokens) if ids[token] != index)
        raise ModelError(f"{meta.path}: the token {twice!r} is in the vocabulary twice")
    return ids


def _byte_level(meta: _Metadata) -> _Built:
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = meta.text("tokenizer.ggml.pre")
    if name is None or name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{meta.path}: tokenizer.ggml.pre {name!r} is not supported, only "
            f"{_listed(PRE_TOKENIZERS)}; use the model's Hugging Face folder"
        )
    pre = PRE_TOKENIZERS[name]
    backend = Tokenizer(
        models.BPE(vocab=_vocabulary(meta), merges=_merges(meta), ignore_merges=pre.whole_words)
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return _Built(backend, pre.add_bos, {})


def _pre_tokenizer(pre: Pre) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_split))
    return pre_tokenizers.Sequence(steps)


def _merges(meta: _Metadata) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in meta.texts("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)  # a token may itself begin with a space
        if cut < 0:
            raise ModelError(
                f"{meta.path}: the merge {merge!r} does not name two tokens; "
                "the file is damaged, fetch it again"
            )
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _sentencepiece(meta: _Metadata) -> _Built:
    """As llama.cpp and sentencepiece do it: a space goes before every stretch of plain text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = meta.index("tokenizer.ggml.unknown_token_id") or 0
    merges = _merges(meta) if meta.has("tokenizer.ggml.merges") else _scored_merges(meta)
    backend = Tokenizer(
        models.BPE(
            vocab=_vocabulary(meta),
            merges=merges,
            unk_token=meta.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.flag("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(decoder)
    return _Built(backend, True, {"unknown": 0, "bos": 1, "eos": 2})


def _scored_merges(meta: _Metadata) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best-scored token first.

    Sentencepiece joins whichever neighbours make the best-scored token; of several ways to make
    the same one the leftmost.  A list of merges can't say "leftmost": the longest left part comes
    first, as in the lists that transformers makes, which differ only in runs of one character.
    """
    scores = meta.numbers("tokenizer.ggml.scores")
    pieces = {
        token
        for token, kind in zip(meta.tokens, meta.types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)  # these are never put together
    }
    found = [
        (-score, -cut, token)
        for token, score in zip(meta.tokens, scores, strict=True)
        if token in pieces
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(token[:-minus_cut], token[-minus_cut:]) for _, minus_cut, token in found]


def _finished(meta: _Metadata, built: _Built) -> Parts:
    """Adds the special tokens, so that templates' texts become single ids, and the BOS."""
    from tokenizers import AddedToken

    named = {name: _special_id(meta, built, name) for name in ("bos", "eos", "unknown", "padding")}
    ends = (named["eos"], *(meta.index(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom")))
    eos_ids = tuple(dict.fromkeys(index for index in ends if index is not None))
    special = {i for i, kind in enumerate(meta.types) if kind in (_UNKNOWN, _CONTROL)}
    special |= {index for index in (named["bos"], *eos_ids) if index is not None}
    whole = sorted(special | {i for i, kind in enumerate(meta.types) if kind == _USER_DEFINED})
    built.backend.add_tokens(
        [AddedToken(meta.tokens[i], normalized=False, special=i in special) for i in whole]
    )
    _add_ends(meta, built, named["bos"], named["eos"])
    template_names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return Parts(
        backend=built.backend,
        special_tokens={
            f"{template_names[name]}_token": meta.tokens[index]
            for name, index in named.items()
            if index is not None
        },
        special_ids=frozenset(special),
        eos_ids=eos_ids,
        chat_template=meta.text("tokenizer.chat_template"),
    )


def _special_id(meta: _Metadata, built: _Built, name: str) -> int | None:
    index = meta.index(f"tokenizer.ggml.{name}_token_id")
    if index is not None:
        return index
    default = built.default_ids.get(name)
    return default if default is not None and default < len(meta.tokens) else None


def _add_ends(meta: _Metadata, built: _Built, bos: int | None, eos: int | None) -> None:
    from tokenizers import processors

    before = bos if meta.flag("tokenizer.ggml.add_bos_token", built.add_bos) else None
    after = eos if meta.flag("tokenizer.ggml.add_eos_token", False) else None
    ends = {"BOS": before, "EOS": after}
    if before is None and after is None:
        return
    built.backend.post_processor = processors.TemplateProcessing(
        single=[*["BOS"] * (before is not None), "$A", *["EOS"] * (after is not None)],
        special_tokens=[
            {"id": name, "ids": [index], "tokens": [meta.tokens[index]]}
            for name, index in ends.items()
            if index is not None
        ],
    )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names))
