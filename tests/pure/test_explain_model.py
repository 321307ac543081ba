"""A model's configuration explained: sizes that are known, choices as they are, nothing refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import house
from stepahead.assemble import toy_parts, weight_values
from stepahead.config import CHOICES as OPTION_CHOICES
from stepahead.config import EngineConfig, config_from, resolve
from stepahead.errors import ConfigError, ModelError, WeightError
from stepahead.explain import glm, sglang, vllm
from stepahead.explain.build import explain_model
from stepahead.explain.choices import CHOICES, NOT_HERE
from stepahead.explain.memory import GPUS, USABLE, Memory, memory_of
from stepahead.explain.report import ModelReport
from stepahead.explain.settings import GIVEN
from stepahead.model.sparse import groups_of, sparse_weight_values, told
from stepahead.model.spec import kv_bytes_per_token, read_spec
from stepahead.observe.books import CAUSES
from stepahead.sync import SyncReason
from text_makers import smollm2

ROOM = 32 * 2**30
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def save(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def explained(model: str = "toy", **options: Any) -> ModelReport:
    return explain_model(model, options, ROOM)


def refused(report: ModelReport) -> dict[str, str]:
    return {entry.name: entry.words for entry in report.refused}


def settled(report: ModelReport) -> dict[str, Any]:
    return {entry.name: entry.value for entry in report.settings}


# --- the configuration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loop": "serial", "num_pages": 500},
        {"loop": "batch-queue", "depth": 5, "max_rows": 700, "kv_memory_gb": 1.5},
        {"max_model_len": 100, "max_step_tokens": 8, "threads": 1, "fence": "coarse"},
    ],
)
def test_what_would_run_is_told_as_the_engine_settles_it(options: dict[str, Any]) -> None:
    report = explained("toy", **options)
    resolved = resolve(config_from("toy", options), toy_parts().facts, ROOM)
    values = dataclasses.asdict(resolved.config)
    assert report.refused == []
    assert settled(report) == {name: value for name, value in values.items() if value is not None}
    told = [entry for entry in report.settings if entry.words not in ("", GIVEN)]
    assert {f"{e.name}={e.value}: {e.words}" for e in told} == set(resolved.reasons)
    assert options.items() >= {e.name: e.value for e in report.settings if e.words == GIVEN}.items()


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        ("toy", {"loop": "overlap", "depth": 3}, "ConfigError", "use loop=batch-queue"),
        ("toy", {"loop": "batch-queue", "depth": 1}, "ConfigError", "at least 2 deep"),
        ("toy", {"max_rows": 5000}, "ConfigError", "at most 1024"),
        ("toy", {"num_pages": 3, "kv_memory_gb": 1.0}, "ConfigError", "give one of them"),
        ("toy", {"max_model_len": 5000}, "ConfigError", "the model knows 4096 positions"),
        ("toy", {"threads": 9999}, "ConfigError", "cores"),
        ("toy", {"num_pages": 10**12}, "NotEnoughMemory", "lower num_pages"),
        ("toy", {"kv_memory_gb": 1e-9}, "NotEnoughMemory", "would hold 0 pages"),
        ("toy", {"device": "hostile"}, "ConfigError", "executor=inline"),
        ("glm-5.3", {}, "NotEnoughMemory", "weights alone take 2,806.4 GiB, and 32.0 GiB"),
        ("glm-5.3", {"dtype": "bfloat16"}, "NotEnoughMemory", "weights alone take 1,403.2 GiB"),
    ],
)
def test_what_would_be_refused_is_said_and_all_else_explained(
    model: str, options: dict[str, Any], error: str, words: str
) -> None:
    report = explained(model, **options)
    assert words in refused(report)[error]
    assert len(report.choices) == len(CHOICES)
    assert {"loop", "max_rows", "device"} <= settled(report).keys()


def test_several_refusals_are_all_told() -> None:
    report = explained("glm-5.3", max_model_len=2**21, threads=9999, kv_memory_gb=1e-9)
    said = " ".join(entry.words for entry in report.refused)
    for words in ("the weights alone", "1048576 positions", "cores"):
        assert words in said
    assert settled(report)["num_pages"] is None


def test_what_was_given_and_does_not_fit_is_still_shown_as_given() -> None:
    entries = {entry.name: entry for entry in explained("toy", num_pages=10**12).settings}
    assert entries["num_pages"].value == 10**12
    assert "does not fit" in entries["num_pages"].words


def test_a_gpu_that_is_not_there_is_no_reason_to_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    report = explain_model("toy", {"device": "cuda"})
    assert "nvidia-smi" in refused(report)["ConfigError"]
    assert settled(report)["device"] == "cuda"
    assert settled(report)["num_pages"] is None


def test_an_option_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown option 'dept'"):
        explained("toy", dept=3)


# --- the choices -------------------------------------------------------------------------------

SHOWN_BY = {
    "serial-prefill": {"chunked-prefill"},
    "host-lengths": {"speculation"},
    "hidden-states": {"hidden-states"},
    "blocking-copy": {"confidential"},
    "staging": {"depth"},
    "drain": {"loop", "depth"},
    "pipeline": {"pipeline"},
    "grammar": {"grammar"},
    "host-processor": set(),
}


def test_every_reason_stands_in_exactly_the_choices_that_can_show_it() -> None:
    shown = {
        reason.value: {choice.name for choice in CHOICES if reason in choice.reasons}
        for reason in SyncReason
    }
    assert shown == SHOWN_BY


def test_all_choices_are_told_once_and_in_the_order_of_the_table() -> None:
    names = [choice.name for choice in explained().choices]
    assert names == [
        *("loop", "depth", "fence", "dp-attention", "chunked-prefill", "speculation", "grammar"),
        *("disaggregation", "mixed-batches", "pipeline", "hidden-states", "confidential"),
        *("hybrid-caches", "diffusion"),
    ]


@pytest.mark.parametrize(
    ("options", "choice", "words"),
    [
        ({"loop": "serial"}, "loop", "land and retire each step before the next"),
        ({"loop": "overlap"}, "loop", "by slot"),
        ({"loop": "batch-queue"}, "loop", "by the rows of the last steps"),
        ({"loop": "serial"}, "depth", "D = 1"),
        ({"loop": "overlap", "max_rows": 10}, "depth", "D = 2: 1 unretired"),
        ({"loop": "batch-queue", "depth": 3, "max_rows": 10}, "depth", "20 spare slots"),
        ({"fence": "coarse"}, "fence", "the end of the running step"),
        ({}, "fence", "last read"),
        ({"serial_prefill": True}, "chunked-prefill", "prompts wait for each other"),
        ({"max_step_tokens": 2048}, "chunked-prefill", "at most 2,048 positions"),
        ({"max_step_tokens": 8, "max_rows": 64}, "chunked-prefill", "at most 64 positions"),
        ({}, "speculation", "no drafts (draft=ngram has them)"),
        ({"draft": "ngram"}, "speculation", "ngram: up to 3 drafts, so 1 to 4 tokens a row"),
        ({}, "grammar", "its row alone is sampled behind the others"),
        ({"device": "hostile", "executor": "inline"}, "confidential", "can be made to block"),
    ],
)
def test_a_choice_tells_what_is_chosen(options: dict[str, Any], choice: str, words: str) -> None:
    told = {c.name: c for c in explained("toy", **options).choices}
    assert words in told[choice].now
    assert told[choice].here


# the option that a choice would come with; once it is there, the choice has to be told anew
COMES_WITH = {
    "dp-attention": "data_parallel_size",
    "disaggregation": "role",
    "confidential": "confidential",
    "hybrid-caches": "mamba",
    "diffusion": "diffusion",
}


def test_what_is_not_in_the_engine_is_said_not_to_be() -> None:
    missing = {choice.name for choice in explained().choices if not choice.here}
    assert missing == COMES_WITH.keys()
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not {name for name, option in COMES_WITH.items() if option in options}
    assert all(c.now.startswith(NOT_HERE) for c in explained().choices if not c.here)


def test_figures_and_causes_to_watch_are_those_of_a_run() -> None:
    texts = [c.watch for c in CHOICES]
    causes = [
        cause.strip() for text in texts for cause in re.findall(r"idle: ([\w\-, ]+?)(?:;|$)", text)
    ]
    named = {part.strip() for cause in causes for part in cause.split(",")}
    known = set(CAUSES)
    assert named
    for name in named:
        assert any(name.startswith(cause) for cause in known), name
    summary = (house.PACKAGE / "cli" / "tables.py").read_text("utf-8")
    for figure in re.findall(r"host exposed|host hidden|TPOT|TTFT", " ".join(texts)):
        assert figure in summary


def test_a_model_that_brings_drafts_is_said_to() -> None:
    told = {c.name: c.now for c in explained("glm-5.3").choices}
    assert "brings 1 MTP layer" in told["speculation"]
    assert "brings" not in {c.name: c.now for c in explained().choices}["speculation"]


def test_rules_of_others_and_choices_end_their_sentences() -> None:
    for words in [
        *(choice.overlap for choice in CHOICES),
        *(rule.words for rule in (*vllm.RULES, *sglang.RULES)),
    ]:
        assert words.endswith(".")
        assert "  " not in words


# --- models ------------------------------------------------------------------------------------


def memory(report: ModelReport) -> Memory:
    assert report.memory is not None
    return report.memory


@pytest.mark.parametrize("name", ["glm-5.3", "GLM-5.3", "zai-org/GLM-5.3", "zai-org/GLM-5.3-BF16"])
def test_glm_has_the_sizes_of_its_published_files(name: str) -> None:
    known = memory(explained(name))
    assert known.parameters == 753_329_921_024
    assert known.active_parameters == pytest.approx(40.3e9, rel=1e-3)
    assert {w.dtype: round(w.bytes / 1e9, 1) for w in known.weights}["fp8"] == 755.6
    cache = {c.dtype: (c.bytes_per_token, c.draft_bytes_per_token) for c in known.cache}
    assert cache == {"bfloat16": (92_628, 1_284), "fp8": (53_940, 788)}
    assert [round(c.longest_bytes / 1e9, 1) for c in known.cache] == [98.5, 57.4]


def test_glm_needs_the_gpus_that_it_is_served_on() -> None:
    fits = {(fit.weights, fit.gpu): fit for fit in memory(explained("glm-5.3")).fits}
    h200 = fits["fp8", "141 GB (H200)"]
    assert h200.gpus == 8
    # a rank's share with what each rank has of its own, and the layer that drafts
    assert h200.weight_bytes_per_gpu / 1e9 == pytest.approx(94.7 + 1.3, abs=0.1)
    assert h200.cache_tokens == pytest.approx(270_000, rel=0.1)
    assert h200.cache_tokens_dp_ep == pytest.approx(1_000_000, rel=0.15)
    assert fits["bfloat16", "141 GB (H200)"].gpus == 16


@pytest.mark.parametrize(
    ("change", "indexers"),
    [
        ({}, 21),
        ({"indexer_types": ["full"] * 5 + ["shared"] * 73}, 5),
        ({"index_topk_freq": 1}, 78),
    ],
)
def test_an_indexer_is_counted_where_a_layer_owns_one(
    change: dict[str, Any], indexers: int
) -> None:
    config = json.loads((house.PACKAGE / "explain" / "glm-5.3.json").read_text())
    shape = glm.read_shape(json.dumps(config | change).encode(), "here")
    assert shape.indexers == indexers
    cache = memory_of(glm.sizes_of(shape)).cache[0]
    assert cache.bytes_per_token == 78 * 1152 + indexers * 132


def test_a_folder_of_its_kind_is_read_like_the_one_that_is_known(tmp_path: Path) -> None:
    config = json.loads((house.PACKAGE / "explain" / "glm-5.3.json").read_text())
    four = {"num_hidden_layers": 4, "indexer_types": ["full"] * 3 + ["shared"]}
    report = explained(save(tmp_path, config | four | {"num_nextn_predict_layers": 0}))
    assert memory(report).parameters == pytest.approx(12.97e9, rel=1e-3)
    assert "UnsupportedModel" not in refused(report)
    assert explained("glm-5.3").memory == explained(save(tmp_path, config)).memory


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_pattern": "FSSFSSSSF"},
        {"index_topk_freq": None, "index_skip_topk_offset": None},
        {"tie_word_embeddings": True},
        {"first_k_dense_replace": 99},
    ],
    ids=str,
)
def test_a_folder_of_its_kind_has_the_sizes_that_the_engine_reckons_with(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Several fields may say the same thing, and one may be null: it is read once, for both."""
    config = json.loads((house.PACKAGE / "explain" / "glm-5.3.json").read_text())
    whole = {"num_hidden_layers": 9, "indexer_types": None, "num_nextn_predict_layers": 0}
    others = {"index_topk_freq": None, "index_skip_topk_offset": None, "mlp_layer_types": None}
    report = explained(save(tmp_path, config | whole | others | changes))
    spec = read_spec(tmp_path)
    assert spec.sparse is not None
    biases = sum(spec.sparse.experts) * spec.sparse.num_experts
    assert memory(report).parameters == weight_values(spec) - biases
    groups = groups_of(spec.sparse, 4)
    assert any(told(groups) in fact for fact in report.facts)


def test_a_variant_of_it_that_is_not_computed_is_explained_all_the_same(tmp_path: Path) -> None:
    config = json.loads((house.PACKAGE / "explain" / "glm-5.3.json").read_text())
    report = explained(save(tmp_path, config | {"n_group": 8}))
    assert "n_group = 8 is not supported, only 1" in refused(report)["UnsupportedModel"]
    assert report.memory == explained("glm-5.3").memory


def test_the_weights_of_glm_are_counted_tensor_by_tensor(tmp_path: Path) -> None:
    config = json.loads((house.PACKAGE / "explain" / "glm-5.3.json").read_text())
    spec = read_spec(save(tmp_path, config))
    assert spec.sparse is not None
    whole = sparse_weight_values(spec.sparse, 6144, 64, 12288, drafts=True)
    # published files are counted without the 256 biases of each router
    assert whole + 2 * 154_880 * 6144 + 6144 == 753_329_921_024 + 76 * 256
    plain = glm.read_shape(json.dumps(config | {"num_nextn_predict_layers": 0}).encode(), "here")
    assert weight_values(spec) == glm.sizes_of(plain).values + 75 * 256


def test_a_supported_folder_has_the_sizes_that_the_engine_reckons_with(tmp_path: Path) -> None:
    report = explained(save(tmp_path, LLAMA))
    spec = read_spec(tmp_path)
    known = memory(report)
    assert report.refused == []
    assert report.architecture == "LlamaForCausalLM"
    assert known.parameters == weight_values(spec)
    sizes = {c.dtype: c.bytes_per_token for c in known.cache}
    assert sizes == {
        "bfloat16": kv_bytes_per_token(spec, 2),
        "float32": kv_bytes_per_token(spec, 4),
    }
    assert {fit.gpus for fit in known.fits} == {1}
    room = GPUS["80 GB (A100, H100)"] * USABLE - 2 * known.parameters
    assert known.fits[0].cache_tokens == int(room // sizes["bfloat16"])
    assert known.fits[0].cache_tokens_dp_ep is None


def test_heads_bound_how_far_the_cache_is_split(tmp_path: Path) -> None:
    large = LLAMA | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100}
    fit = memory(explained(save(tmp_path, large))).fits[0]
    assert fit.gpus > 2
    spec = read_spec(tmp_path)
    room = GPUS["80 GB (A100, H100)"] * USABLE - 2 * weight_values(spec) / fit.gpus
    assert fit.cache_tokens == int(2 * room // kv_bytes_per_token(spec, 2))


def test_an_unknown_architecture_is_explained_as_far_as_its_files_go(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 3_000_000)
    name = save(tmp_path, {"architectures": ["MambaForCausalLM"], "vocab_size": 9})
    report = explained(name)
    assert "MambaForCausalLM is not supported" in refused(report)["UnsupportedModel"]
    assert report.memory is None
    assert settled(report)["num_pages"] is None
    assert settled(report)["max_model_len"] is None
    assert report.facts == ["0.00 GB of weights in its files"]
    assert "not known" in {c.name: c.now for c in report.choices}["hybrid-caches"]
    assert settled(explained(name, max_model_len=64))["max_model_len"] == 64


def test_a_gguf_file_is_explained() -> None:
    report = explained(str(smollm2()))
    assert report.architecture == "LlamaForCausalLM"
    assert memory(report).parameters == pytest.approx(134.5e6, rel=0.01)


@pytest.mark.parametrize("config", ["{", '{"architectures": ["Glm"', "[]", "3"])
def test_a_damaged_config_is_an_error_that_names_it(tmp_path: Path, config: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        explained(save(tmp_path, config))


@pytest.mark.parametrize(
    "config",
    ["{}", '{"architectures": []}', '{"architectures": ["A"], "vocab_size": "many"}'],
)
def test_a_config_that_says_nothing_is_explained_all_the_same(tmp_path: Path, config: str) -> None:
    report = explained(save(tmp_path, config))
    assert "is not supported" in refused(report)["UnsupportedModel"]


def test_an_incomplete_config_of_a_known_kind_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing required field"):
        explained(save(tmp_path, {"architectures": [glm.ARCHITECTURE]}))


def test_a_model_that_is_nowhere_is_an_error_that_names_those_known() -> None:
    with pytest.raises(WeightError, match=r"no such file.*glm-5\.3 and toy are known.*after --"):
        explained("no/such-model")


@pytest.mark.parametrize("loop", OPTION_CHOICES["loop"])
def test_every_loop_is_explained_for_a_model_that_does_not_fit(loop: str) -> None:
    report = explained("glm-5.3", loop=loop)
    assert settled(report)["depth"] == EngineConfig("m", loop=loop).steps_ahead
