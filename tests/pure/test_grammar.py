"""Grammars are compiled or refused by name, never widened; tokens have the bytes we say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import pytest

import grammars
import stepahead
import text_makers as makers
from schemas import SCHEMAS
from stepahead.errors import InvalidParameter, UnsupportedModel
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.grammar.deep import on_deep_stack
from stepahead.structured import StructuredOutputs
from stepahead.text import Tokenizer

# every byte is a token, so that any JSON can be written
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b"<eos>"], [256], [256])
COMPILER = GrammarCompiler(BYTES)
EOS = 256


def compiles(**asked: Any) -> llguidance.LLMatcher:
    grammar = COMPILER.compile(StructuredOutputs(**asked))
    return llguidance.LLMatcher(BYTES.tokenizer(), grammar.text, log_level=0)


def takes(matcher: llguidance.LLMatcher, text: str) -> bool:
    """Whether `text` is in the language."""
    one, ids = matcher.deep_copy(), list(text.encode())
    return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"regex": "a+b"}, ["ab", "aab"], ["", "b", "aa", "abb"]),
        ({"regex": "^(a|b)$"}, ["a", "b"], ["ab", "^a$"]),
        ({"regex": "a/b\\d[\\d]"}, ["a/b70"], ["a/b", "a/b٣٣"]),
        ({"regex": "é{2}|😀"}, ["éé", "😀"], ["é"]),
        ({"regex": ""}, [""], ["a"]),
        ({"choice": ["yes", "no", "yes!"]}, ["yes", "no", "yes!"], ["", "ye", "yesno"]),
        ({"choice": ['"', "\\", "\n", "你", ""]}, ['"', "\\", "\n", "你", ""], ["\\\\", "n"]),
        ({"grammar": 'start: "a" ("," "a")*'}, ["a", "a,a"], ["", "a,"]),
        ({"grammar": 'root ::= "a" | "(" root ")"'}, ["a", "((a))"], ["(a", "()"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{a:1}", "{} "]),
        ({"json": {"type": "object"}}, ["{}"], ["[]"]),
        ({"json": '{"const": "é"}'}, ['"é"'], ['"e"', "é"]),
        ({"json": {"enum": [1, "a"]}}, ["1", '"a"'], ["a", "2"]),
        ({"json": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}, ["1"], ["0"]),
        ({"json": {"minProperties": 1, "type": "object"}}, ['{"a":1}'], ["{}"]),
    ],
)
def test_what_is_asked_is_what_may_be_said(
    asked: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    matcher = compiles(**asked)
    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


def test_properties_keep_the_order_of_the_schema() -> None:
    def schema(*names: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: {"type": "null"} for name in names},
            "required": list(names),
            "additionalProperties": False,
        }

    one, other = compiles(json=schema("b", "a")), compiles(json=schema("a", "b"))
    assert takes(one, '{"b":null,"a":null}')
    assert not takes(one, '{"a":null,"b":null}')
    assert takes(other, '{"a":null,"b":null}')


def test_white_space_in_json_is_bounded() -> None:
    matcher = compiles(json={"type": "array", "maxItems": 1, "items": {"type": "null"}})
    assert takes(matcher, "[" + " " * 32 + "null\n]")
    assert not takes(matcher, "[" + " " * 33 + "null]")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"if": {}, "then": {}}}, "Unimplemented keys"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "array", "contains": {}}}, "contains"),
        ({"json": {"propertyNames": {}}}, "propertyNames"),
        ({"json": {"dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
        ({"json": {"unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
        ({"json": {"type": "string", "format": "iban"}}, "Unknown format: iban"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"type": "strng"}}, "Invalid type: strng"),
        ({"json": {"$ref": "http://x/y"}}, "http://x/y"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": {"const": float("nan")}}, "JSON"),
        ({"json": {"const": "\ud800"}}, "hex escape"),
        ({"choice": ["\ud800"]}, "surrogate"),
        ({"json": {"enum": {1, 2}}}, "can't be written as JSON"),
        # what the library would take without holding it
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "x-guidance"),
        ({"json": {"properties": {"a": {"minProperties": 2}}}}, "minProperties above 1"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "x-guidance"),
        ({"grammar": "start: a\na[temperature=0.5]: /a/"}, "temperature="),
        ({"grammar": 'start: a "b"\na[lazy, max_tokens=3]: /a*/'}, "max_tokens="),
        ({"grammar": 'start: a "b"\na[stop="b"]: /a*/'}, "stop="),
        ({"grammar": 'start: %json {"minProperties": 5}'}, "minProperties above 1"),
        ({"grammar": 'start: %json {"a": ' + "9" * 5000 + "}"}, "%json is no JSON"),
        ({"json": {"type": "integer", "minimum": 10**30, "maximum": 10**31}}, "2**53"),
        ({"json": {"type": "integer", "exclusiveMinimum": 2**53}}, "2**53"),
        ({"json": {"type": "number", "maximum": -1e30}}, "2**53"),
        ({"json": {"const": [{"a": 2**53 + 1}]}}, "2**53"),
        # nothing can be said
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
        ({"json": {"type": "integer", "minimum": 1.2, "maximum": 1.8}}, "no integer"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text"),
        ({"regex": "[^\\s\\S]"}, "no text can match it"),
        ({"grammar": 'start: start "a"'}, "no text can match it"),
        # wrong texts
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(a)\\1"}, "backreferences"),
        ({"regex": "a\\b"}, "lookarounds"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "start: nobody"}, 'unknown name: "nobody"'),
        ({"grammar": "start: <nobody>"}, "unknown special token"),
        ({"grammar": ""}, "neither Lark nor GBNF"),
        # what would take the library seconds
        ({"regex": "a?" * 3000}, "at most 4096"),
        ({"grammar": 'start: "a"' + " " * 20_000}, "at most 16384"),
        ({"json": {"description": "x" * 200_000}}, "at most 131072"),
        ({"json": {"type": "string", "pattern": "a?" * 3000}}, "pattern has more than 4096"),
        (
            {"json": {"patternProperties": {f"^{number}$": {} for number in range(65)}}},
            "more than 64 patterns",
        ),
        ({"choice": [f"choice {number}" for number in range(20_000)]}, "at most 131072"),
        ({"json": {"type": "integer", "multipleOf": 99_991}}, "multipleOf above 65536"),
        (
            {"json": {"properties": {f"{n}": {"multipleOf": 9.999 + n} for n in range(9)}}},
            "multipleOf above 65536",
        ),
        ({"grammar": 'start: %json {"multipleOf": 99991}'}, "multipleOf above 65536"),
        # what it would take, only to give up behind the first brace
        (
            {"json": {"type": "object", "properties": {f"p{n}": {} for n in range(401)}}},
            "more than 400 properties may be left out",
        ),
    ],
)
def test_what_can_not_be_held_is_refused_by_name(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        COMPILER.compile(StructuredOutputs(**asked))
    assert says in str(refused.value)
    assert refused.value.param.startswith("structured_outputs")
    assert len(str(refused.value)) < 600


def test_what_is_near_a_bound_is_taken() -> None:
    names = [f"p{number}" for number in range(1000)]
    properties = {name: {"type": "boolean"} for name in names}
    COMPILER.compile(StructuredOutputs(json={"properties": properties, "required": names[:600]}))
    for of in (0.01, 1e9, 65_536, 12.5):
        COMPILER.compile(StructuredOutputs(json={"type": "number", "multipleOf": of}))
    for number in ({"const": 2**53 - 1}, {"enum": [1e300]}, {"type": "integer", "maximum": 1e15}):
        COMPILER.compile(StructuredOutputs(json=number))
    COMPILER.compile(StructuredOutputs(grammar='start: "a" %json {"type": "integer"} "}"'))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "has nothing"),
        ({"json_object": False}, "has nothing"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice"),
        ({"regex": 3}, "regex must be str"),
        ({"json": []}, "json must be dict or str"),
        ({"json_object": "yes"}, "json_object must be bool"),
        ({"choice": []}, "one or more strings"),
        ({"choice": ["a", 1]}, "one or more strings"),
    ],
)
def test_a_wish_that_is_none_is_refused_when_built(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        StructuredOutputs(**asked)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_of_the_walks_compiles(name: str) -> None:
    assert not compiles(json=SCHEMAS[name]).is_error()


def test_equal_wishes_have_one_grammar_whoever_asks() -> None:
    compiler, found = GrammarCompiler(BYTES), []
    schema = json.loads(json.dumps(SCHEMAS["order"]))

    def ask() -> None:
        found.extend(compiler.compile(StructuredOutputs(json=schema)) for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert compiler.compile(StructuredOutputs(json=SCHEMAS["order"])) is compiler.compile(
        StructuredOutputs(json=schema)
    )


def test_grammars_wishes_and_vocabularies_travel() -> None:
    asked = StructuredOutputs(json=SCHEMAS["order"])
    grammar = COMPILER.compile(asked)
    for value in (asked, grammar):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(BYTES), type=Vocabulary)
    assert there.token_bytes == BYTES.token_bytes
    assert GrammarCompiler(there).compile(asked) == grammar


_CHAINS = """
import json
from stepahead.errors import InvalidParameter
from stepahead.grammar import GrammarCompiler, Vocabulary
from stepahead.structured import StructuredOutputs
from llguidance import LLExecutor, LLMatcher

vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [b"<eos>"], [256], [256])
compiler = GrammarCompiler(vocabulary)
def references(count):
    defs = {f"a{n}": {"anyOf": [{"type": "null"}, {"type": "array", "items":
            {"$ref": f"#/$defs/a{n + 1}"}}]} for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{count}": {"type": "null"}}}
compiler.compile(StructuredOutputs(json=references(1200)))
rules = "start: r0\\n" + "\\n".join(f"r{n}: r{n+1}" for n in range(1100)) + '\\nr1100: "a"'
compiler.compile(StructuredOutputs(grammar=rules))
try:
    compiler.compile(StructuredOutputs(json=references(2600)))
except InvalidParameter as refused:
    print(refused)
"""


def test_long_chains_of_rules_and_references_do_not_end_the_process() -> None:
    """On an ordinary stack 1,000 references and 3,000 rules overran it: a signal, no error."""
    environment = os.environ | {"PYTHONPATH": str(Path(stepahead.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", _CHAINS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "are too many; flatten the schema" in done.stdout


def test_what_fails_on_the_deep_stack_is_raised_here() -> None:
    before = threading.stack_size()
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)
    assert on_deep_stack(lambda: 5) == 5
    assert threading.stack_size() == before


def tokenizers_of_all_kinds(folder: Path) -> list[Tokenizer]:
    specs = {
        "bytes": makers.byte_level_json(),
        "sentencepiece": makers.sentencepiece_json(),
        "unigram": makers.unigram_json(),
    }
    found = [
        Tokenizer.load(makers.save_folder(folder / name, spec)) for name, spec in specs.items()
    ]
    return [*found, Tokenizer.load(makers.chat_folder(folder / "chat"))]


def check_bytes(texts: Tokenizer, eos: list[int]) -> None:
    size = texts.vocab_size + 37
    vocabulary = Vocabulary.of(texts, size, eos)
    theirs = vocabulary.tokenizer()
    assert theirs.vocab_size == size
    assert sorted(theirs.eos_tokens) == sorted(eos)
    special = {*texts.special_ids, *eos}
    # no text has this byte: the library marks special tokens with it, and one that it begins is one
    special |= {token for token, piece in enumerate(texts.token_bytes) if piece[:1] == b"\xff"}
    for token, piece in enumerate(texts.token_bytes):
        assert theirs.decode_bytes([token]) == piece or piece == b"\xff"
        assert theirs.is_special_token(token) == (token in special)
    matcher = llguidance.LLMatcher(
        theirs, GrammarCompiler(vocabulary).compile(StructuredOutputs(regex="(?s:.*)")).text
    )
    mask = matcher.compute_bitmask()
    on = {token for token in range(size) if mask[token // 8] >> token % 8 & 1}
    # no padding, no gap, and of the special tokens only those that end an answer
    assert on.isdisjoint(range(texts.vocab_size, size))
    assert on & special == set(eos)
    assert all(texts.token_bytes[token] for token in on)
    assert len(on) > 0.2 * texts.vocab_size


def test_tokens_have_our_bytes_whatever_the_tokenizer(tmp_path: Path) -> None:
    for texts in tokenizers_of_all_kinds(tmp_path):
        check_bytes(texts, [1, 2])


def test_tokens_have_our_bytes_in_a_real_vocabulary() -> None:
    texts = Tokenizer.load(makers.smollm2())
    check_bytes(texts, list(texts.eos_ids))


def test_a_vocabulary_that_can_not_be_used_is_refused() -> None:
    class Texts:
        token_bytes = (b"a", b"b")
        special_ids = frozenset({0})

    with pytest.raises(UnsupportedModel, match="2 tokens and the model only 1 logits"):
        Vocabulary.of(Texts(), 1, [0])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match="no end-of-sequence token"):
        Vocabulary.of(Texts(), 2, [])  # type: ignore[arg-type]
    assert grammars.tiny_vocabulary().words == 2
