"""Ids, texts and chat prompts against transformers, and where it is wrong, against the origin."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

import text_makers as makers
from offline_makers import tiny_llama
from stepahead import LLM, SamplingParams
from stepahead.text import Tokenizer, render_chat

# whitespace before digits: see `test_the_real_gguf_...`
BEFORE_DIGITS = ("a   12", "list:\n\n1. one\n\n2. two", "x\t\t3", "   12   34\n\n\n56")
REPOSITORY = Path(__file__).parents[2]


def theirs(path: Path) -> Any:
    """What transformers makes of a folder or a GGUF file."""
    if path.is_dir():
        return transformers.AutoTokenizer.from_pretrained(path)
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def corpus() -> list[str]:
    sources = sorted((REPOSITORY / "src" / "stepahead").glob("*.py"))
    return [*makers.TEXTS, *(source.read_text(encoding="utf-8") for source in sources)]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    path = makers.smollm2()
    return Tokenizer.load(path), theirs(path)


# --- the real model


def test_the_real_gguf_against_the_tokenizer_it_was_made_from(
    smollm2: tuple[Tokenizer, Any],
) -> None:
    # transformers reads vocabulary and merges right, but knows no `smollm` among the names of
    # tokenizer.ggml.pre and cuts text as GPT-2 does.  SmolLM2's own tokenizer.json has
    # Digits(individual_digits=True) before that, and llama.cpp does the same; that the vocabulary
    # has no token with a digit and anything else shows that it was trained so.
    ours, hf = smollm2
    origin = tokenizers.Tokenizer.from_str(hf.backend_tokenizer.to_str())
    origin.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in (*corpus(), *BEFORE_DIGITS):
        ids = ours.encode(text)
        assert ids == origin.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True)


def test_the_real_gguf_against_transformers_where_no_digit_follows_whitespace(
    smollm2: tuple[Tokenizer, Any],
) -> None:
    ours, hf = smollm2
    for text in corpus():
        text = "".join(c for c in text if not c.isnumeric())
        assert ours.encode(text) == hf.encode(text)
    # should this fail, transformers has learnt the name: compare everything with it then
    assert [ours.encode(text) == hf.encode(text) for text in BEFORE_DIGITS] == [False] * 4


def test_the_real_ggufs_special_tokens_and_chat(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, hf = smollm2
    assert (ours.bos_id, ours.eos_ids) == (hf.bos_token_id, (hf.eos_token_id,))
    assert ours.vocab_size == len(hf)
    assert set(hf.all_special_ids) <= ours.special_ids
    for chat in (makers.MESSAGES, makers.MESSAGES[1:]):
        for prompt in (True, False):
            shown = hf.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
            ids = ours.encode_chat(chat, add_generation_prompt=prompt)
            assert ours.decode(ids, skip_special_tokens=False) == shown


# --- folders


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("has_bos", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "llama", "unigram"])
def test_folders_give_the_ids_that_transformers_gives(
    tmp_path: Path, kind: str, has_bos: bool, flags: dict[str, bool]
) -> None:
    spec, bos = {
        "bytes": (makers.byte_level_json(), "<|im_start|>"),
        "llama": (makers.sentencepiece_json(), "<s>"),
        "unigram": (makers.unigram_json(), "</s>"),
    }[kind]
    folder = makers.save_folder(
        tmp_path,
        makers.with_bos(spec, bos) if has_bos else spec,
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos} | flags,
    )
    ours, hf = Tokenizer.load(folder), theirs(folder)
    assert ours.bos_id == hf.bos_token_id
    assert ours.special_ids >= set(hf.all_special_ids)
    assert len(ours.encode("")) == has_bos
    for text in makers.TEXTS:
        ids = ours.encode(text)
        assert ids == hf.encode(text)
        assert ours.encode(text, add_special_tokens=False) == hf.encode(
            text, add_special_tokens=False
        )
        for skip in (True, False):
            assert ours.decode(ids, skip) == hf.decode(ids, skip_special_tokens=skip)


def test_a_chat_folder_gives_the_prompt_that_transformers_gives(tmp_path: Path) -> None:
    folder = makers.chat_folder(tmp_path)
    ours, hf = Tokenizer.load(folder), theirs(folder)
    for prompt in (True, False):
        ids = hf.apply_chat_template(
            makers.MESSAGES, add_generation_prompt=prompt, return_dict=False
        )
        assert ours.encode_chat(makers.MESSAGES, add_generation_prompt=prompt) == ids
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert list(ours.eos_ids) == generation.eos_token_id
    assert ours.eos_ids[0] == hf.eos_token_id


# as the templates of well-known models, in short
TEMPLATES = {
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 > ns.last %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "mistral": """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'user' %}
        {% if (loop.index0 % 2 == 0) == (messages[0].role == 'system') %}
            {{ raise_exception('roles must alternate') }}
        {% endif %}
[INST] {{ message['content'] }} [/INST]
    {% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}

    {% endif %}
{% endfor %}
""",
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "<a> & 'b' é", "parameters": {"type": "object"}},
    }
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "variables", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=["", "tools", "thinking"]
)
def test_templates_are_rendered_as_transformers_does(
    tmp_path: Path, name: str, variables: dict[str, Any]
) -> None:
    hf = theirs(makers.chat_folder(tmp_path))
    chat = [*makers.MESSAGES, {"role": "assistant", "content": " 42 "}]
    for messages in (chat, chat[:2], chat[1:2]):
        for prompt in (True, False):
            expected = hf.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                add_generation_prompt=prompt,
                tokenize=False,
                **variables,
            )
            assert expected == render_chat(
                TEMPLATES[name],
                messages,
                add_generation_prompt=prompt,
                special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
                **variables,
            )


# --- where an answer ends


@pytest.mark.parametrize("least", [0, 4])
def test_ends_that_are_no_tokens_end_nothing(tmp_path: Path, least: int) -> None:
    """Below zero they would be indices from the end: of another token's logits, or of none's."""
    folder = tiny_llama(tmp_path)
    options = {"executor": "inline", "threads": 1, "max_rows": 1}
    greedy = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=least, ignore_eos=True)
    with LLM(folder, **options) as llm:
        free = llm.generate([[5, 6]], greedy)[0].outputs[0].token_ids
    ends = [-5000, -1, 10**6, free[5]]
    said = json.dumps({"eos_token_id": ends, "pad_token_id": 0})
    (folder / "generation_config.json").write_text(said, encoding="utf-8")
    with LLM(folder, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=least)
        ours = llm.generate([[5, 6]], params)[0].outputs[0]
        assert set(llm.resolved.facts.eos_ids) == {2, free[5]}
    hf = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    hf.generation_config.eos_token_id = ends
    asked = torch.tensor([[5, 6]])
    wanted = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": least}
    theirs_ids = hf.generate(asked, attention_mask=torch.ones_like(asked), **wanted)[0, 2:]
    assert ours.token_ids == theirs_ids.tolist() == free[:6]
    assert ours.finish_reason == "stop"


# --- GGUF files of other pre-tokenizers


@pytest.mark.parametrize(
    "pre",
    ["gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen", "qwen35", "tekken", "gpt-4o", "llama4"],
)
def test_gguf_files_against_transformers(tmp_path: Path, pre: str) -> None:
    path = makers.save_gguf(
        tmp_path / "m.gguf",
        makers.byte_level_json(),
        pre=pre,
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=True,
    )
    ours, hf = Tokenizer.load(path), theirs(path)
    for text in corpus():
        # transformers leaves out the NFC that Qwen's tokenizer.json has
        text = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == hf.encode(text)
    if pre.startswith("qwen"):
        assert ours.encode("a\u0301") == ours.encode("á") == hf.encode("á") != hf.encode("a\u0301")


def test_a_sentencepiece_gguf_against_transformers(tmp_path: Path) -> None:
    path = makers.save_sentencepiece_gguf(
        tmp_path / "m.gguf",
        makers.sentencepiece_json(),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    ours, hf = Tokenizer.load(path), theirs(path)
    for text in corpus():
        if not text.startswith(" "):
            assert ours.encode(text) == hf.encode(text)
            assert ours.decode(ours.encode(text)) == text
    # sentencepiece, llama.cpp and Llama-2's tokenizer.json put a space before every stretch of
    # text; transformers' class only before the first, and not if it begins with one
    assert ours.encode("  fox") != hf.encode("  fox")
    assert ours.decode(ours.encode("  fox")) == "  fox" != hf.decode(hf.encode("  fox")[1:])
