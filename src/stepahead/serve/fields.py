"""Which fields a request may have, and what becomes of each.  Knows JSON, no engine.

A field is honoured, or refused by name.  Some that can't be honoured may have one value that asks
for nothing; with any other they are refused.  null is as if the field were not there, as clients
mean it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from stepahead.serve.refusal import bad_request

# what SamplingParams has under the same name
SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
# other engines' names for what SamplingParams calls otherwise
SPELLINGS = {"vllm_xargs": "extra_args", "custom_params": "extra_args"}
_CHAT = "a prompt is completed as it stands; use chat for it"
_LIBRARY = "grammars are llguidance's; leave it out"
_SOUND = "only text is understood and made; leave it out"
_BEAM = "beam search is not supported; leave it out"
_ADAPTER = "adapters are not supported; leave it out"
_KV = "moving a request's KV between servers is not supported; leave it out"
_HOOK = "code in a request is not run; leave it out"
_THINK = "what reasoning a template knows to ask for goes in chat_template_kwargs"

# field: (values that ask for nothing, what is said of any other)
NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    # OpenAI's
    "audio": ((), _SOUND),
    "modalities": ((["text"],), _SOUND),
    "functions": (([],), "an older spelling that is not read; give tools"),
    "function_call": (("none",), "an older spelling that is not read; give tool_choice"),
    "prediction": ((), "predicted outputs are not supported; leave it out"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "pages stay as long as there is room"),
    "reasoning_effort": ((), _THINK),
    "verbosity": (("medium",), "a model's verbosity can't be set; ask for it in the prompt"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "store": ((False,), "nothing is stored; leave it out"),
    "web_search_options": ((), "the web is not searched; leave it out"),
    "suffix": (("",), "filling in between is not supported; leave it out"),
    "moderation": ((), "nothing is moderated; leave it out"),
    # vLLM's, SGLang's, or both's
    "guided_decoding_backend": (("auto", "guidance", "llguidance"), _LIBRARY),
    "guided_whitespace_pattern": ((), "white space can't be chosen; leave it out"),
    "structural_tag": ((), "it is not supported; ask for calls with tools"),
    "use_beam_search": ((False,), _BEAM),
    "length_penalty": ((1.0,), _BEAM),
    "early_stopping": ((False,), _BEAM),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides about spaces; leave it out"),
    "priority": ((0,), "requests run in the order they come; leave it out"),
    "cache_salt": ((), "the prefix cache is shared by all; start a server with --no-prefix-cache"),
    "kv_transfer_params": ((), _KV),
    "bootstrap_host": ((), _KV),
    "bootstrap_port": ((), _KV),
    "bootstrap_room": ((), _KV),
    "disagg_prefill_dp_rank": ((), _KV),
    "data_parallel_rank": ((), "there are no ranks to choose from; leave it out"),
    "routed_dp_rank": ((), "there are no ranks to choose from; leave it out"),
    "lora_path": ((), _ADAPTER),
    "logits_processors": (([],), _HOOK),
    "custom_logit_processor": ((), _HOOK),
    "session_params": ((), "sessions are not kept; send the whole conversation"),
    "mm_processor_kwargs": ((), _SOUND),
    "media_io_kwargs": ((), _SOUND),
    "stop_regex": ((), "stop takes texts, not patterns"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "return_hidden_states": ((False,), "hidden states are told by LLM.generate alone"),
    "return_routed_experts": ((False,), "expert routing is not told; leave it out"),
    "chat_template": ((), "a template is code: start the server with --chat-template FILE"),
    "continue_final_message": ((False,), "an answer can't be continued yet; use completions"),
    "documents": (([],), "give them with chat_template_kwargs, if the template knows them"),
    "stream_reasoning": ((True,), "reasoning is told as it comes; leave it out"),
    "thinking_token_budget": ((), "reasoning ends when the model ends it; leave it out"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "repetition_detection": ((), "repetition is not detected; use the penalties"),
    "truncation": (("disabled",), "a prompt that is too long is refused; shorten it"),
    "truncate_prompt_tokens": ((), "a prompt that is too long is refused; shorten it"),
    "return_text_in_logprobs": ((True,), "texts are always told; leave it out"),
}
# the same for completions, which know no conversation
TEXT_NOT_YET = NOT_YET | {
    "tools": (([],), _CHAT),
    "tool_choice": (("none", "auto"), _CHAT),
    "parallel_tool_calls": ((True, False), _CHAT),
    "include_reasoning": ((True,), _CHAT),
    "separate_reasoning": ((True,), _CHAT),
}
Kind = TypeVar("Kind", bound=msgspec.Struct)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, without the fields that are null; Refusal."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is no JSON ({error})", None, "invalid_json") from error
    if not isinstance(found, dict):
        raise bad_request(
            f"the body must be a JSON object, not {type(found).__name__}", None, "invalid_json"
        )
    return {name: value for name, value in found.items() if value is not None}


def split_sampling(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that are sampling parameters, by our names, and the others; Refusal."""
    sampling = {name: value for name, value in found.items() if name in SAMPLING}
    for name, ours in SPELLINGS.items():
        if name in found:
            if ours in sampling:
                raise bad_request(f"{' and '.join(SPELLINGS)} are one; give one of them", name)
            sampling[ours] = found[name]
    rest = {n: value for n, value in found.items() if n not in SAMPLING and n not in SPELLINGS}
    return sampling, rest


def take_neutral(
    found: Mapping[str, Any],
    refused: Mapping[str, tuple[tuple[Any, ...], str]] = NOT_YET,
    inside: str = "",
) -> dict[str, Any]:
    """The fields without those of `refused` that ask for nothing; Refusal names one that does, or
    the field that it is `inside` of."""
    for name in found:
        if name in refused:
            neutral, words = refused[name]
            if not any(_same(found[name], value) for value in neutral):
                where = f"{inside}.{name}" if inside else name
                raise bad_request(f"{where}: {words}", inside or name, "unsupported_value")
    return {name: value for name, value in found.items() if name not in refused}


def _same(given: Any, neutral: Any) -> bool:
    # 0 is False, and 1 is True, to ==
    return given == neutral and isinstance(given, bool) == isinstance(neutral, bool)


def convert(found: dict[str, Any], kind: type[Kind]) -> Kind:
    """The fields as a struct; Refusal names one that is unknown, missing or of another type."""
    known = kind.__struct_encode_fields__
    for name in found:
        if name not in known:
            raise bad_request(f"{name}: no such field is known", name[:100], "unknown_field")
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`").partition(".")[0].partition("[")[0] or _missing(words)
        raise bad_request(f"{param}: {words}" if param else words, param) from error


def _missing(words: str) -> str | None:
    # Object missing required field `messages`
    return words.rpartition("field `")[2].rstrip("`") if "missing required" in words else None
