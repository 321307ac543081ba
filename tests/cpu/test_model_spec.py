"""What is read from config.json and GGUF metadata, and what is refused by name."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import gguf_tensors, make_reference, smollm2_path, write_gguf

from stepahead.errors import ModelError, UnsupportedModel, WeightError
from stepahead.model.spec import ModelSpec, RopeSpec, read_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def write_config(folder: Path, generation: Any = None, **changes: Any) -> Path:
    config = {key: value for key, value in (LLAMA | changes).items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_plain_llama(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path))
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_len=256,
        rope=RopeSpec(10_000.0),
        path=str(tmp_path),
        format="safetensors",
    )


def test_spec_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from stepahead.model.spec import read_spec; "
        f"read_spec({str(write_config(tmp_path))!r}); read_spec({str(smollm2_path())!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], {"eos_token_id": [2, 7]}, (5, 2, 7)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, None, ()),
    ],
)
def test_eos_tokens(
    config: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, generation, eos_token_id=config, bos_token_id=1)
    assert read_spec(folder).eos_token_ids == expected
    assert read_spec(folder).bos_token_id == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeSpec(7.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeSpec(5e5, "linear", 2.0),
        ),
        (
            {"rope_scaling": ROPE | {"original_max_position_embeddings": 64}},
            RopeSpec(10_000.0, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        ({"rope_scaling": ROPE}, RopeSpec(10_000.0, "llama3", 8.0, 1.0, 4.0, 256)),
    ],
)
def test_rope(changes: dict[str, Any], expected: RopeSpec, tmp_path: Path) -> None:
    assert read_spec(write_config(tmp_path, **changes)).rope == expected


MISTRAL = {"architectures": ["MistralForCausalLM"]}
SLIDES = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "num_hidden_layers": 7}


@pytest.mark.parametrize(
    ("changes", "window", "windowed"),
    [
        (MISTRAL | {"sliding_window": 100}, 100, (True, True)),
        (MISTRAL | {"sliding_window": None}, None, ()),
        (MISTRAL, 4096, (True, True)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, None, ()),
        (SLIDES | {"max_window_layers": 1}, 100, (False, True)),
        (SLIDES | {"max_window_layers": 2}, None, ()),  # no layer is left to slide
        (
            SLIDES | {"layer_types": ["sliding_attention", "full_attention"]},
            *(100, (True, False)),
        ),
        ({"sliding_window": 100}, None, ()),  # Llama has none, whatever its config says
        (GEMMA, 4096, (True, True, True, True, True, False, True)),
        (
            GEMMA | {"sliding_window": 64, "sliding_window_pattern": 2},
            64,
            (True, False) * 3 + (True,),
        ),
    ],
)
def test_which_layers_see_a_window(
    changes: dict[str, Any], window: int | None, windowed: tuple[bool, ...], tmp_path: Path
) -> None:
    spec = read_spec(write_config(tmp_path, **changes))
    assert (spec.sliding_window, spec.windowed) == (window, windowed)
    assert spec.max_len == 256  # however short the window


def test_a_window_that_the_config_leaves_out_is_told(tmp_path: Path) -> None:
    (note,) = read_spec(write_config(tmp_path, **MISTRAL)).notes
    assert "Mistral's default is 4096" in note


def test_gemma_ropes_of_both_spellings(tmp_path: Path) -> None:
    """One for layers that see all, one for the others."""
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    older = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    for changes in ({"rope_parameters": kinds}, older):
        spec = read_spec(write_config(tmp_path, **GEMMA, **changes))
        assert spec.rope == RopeSpec(5e5, "linear", 8.0)
        assert spec.window_rope == RopeSpec(2e4)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        (
            GEMMA | {"final_logit_softcapping": 30.0},
            "final_logit_softcapping = 30.0 is not",
        ),
        (GEMMA | {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported"),
        (GEMMA | {"layer_types": ["sliding_attention"]}, "layer_types is for 1 layers, num_hidd"),
        (GEMMA | {"layer_types": ["full_attention"]}, "layer_types is for 1 layers, num_hidden"),
        (
            GEMMA | {"layer_types": ["chunked_attention"] * 7},
            "layer_types = 'chunked_attention' is not supported, only 'sliding_attention' and",
        ),
        (GEMMA | {"sliding_window": None}, "sliding_window = None is not supported"),
        (GEMMA | {"rms_norm_eps": -1.0}, r"at `\$.rms_norm_eps`"),
        ({"num_hidden_layers": 1 << 40}, r"at `\$.num_hidden_layers`"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            "rope_scaling and rope_parameters are both there and differ",
        ),
        ({"architectures": "left out"}, "architecture unnamed is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' lacks 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "each kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"num_attention_heads": 3}, "3 heads can't share 2 KV heads"),
        ({"head_dim": 7}, "even head_dim, not 7"),
        ({"hidden_size": "32"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"hidden_size": 0}, r"at `\$.hidden_size`"),
        ({"vocab_size": "left out"}, "missing required field `vocab_size`"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim is missing"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": "left out"},
            "num_key_value_heads is missing",
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=complaint) as caught:
        read_spec(write_config(tmp_path, **changes))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_not_json(name: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_text('{"eos_token_id": 2')
    with pytest.raises(WeightError, match=f"{name}: not JSON"):
        read_spec(tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000)
    with pytest.raises(WeightError, match=f"{name}: not JSON"):
        read_spec(tmp_path)


def test_no_such_files(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"not a model's folder: there is no config\.json"):
        read_spec(tmp_path)
    with pytest.raises(WeightError, match="nowhere: no such file or folder"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(WeightError, match=r"none\.gguf: can't be read: No such file"):
        read_spec(tmp_path / "none.gguf")
    with pytest.raises(WeightError, match="xxx: no such file or folder"):
        read_spec("x" * 5000)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=r"model\.bin: neither a folder nor a \.gguf"):
        read_spec(tmp_path / "model.bin")


# --- GGUF -------------------------------------------------------------------------------------


def write_tiny(folder: Path, family: str = "llama", **metadata: Any) -> Path:
    model = make_reference(family)
    write_gguf(folder / "tiny.gguf", model, gguf_tensors(model), **metadata)
    return folder / "tiny.gguf"


def test_smollm2() -> None:
    spec = read_spec(smollm2_path())
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (576, 1536, 49152)
    assert (spec.max_len, spec.tied_head, spec.eos_token_ids) == (8192, True, (2,))
    assert spec.rope == RopeSpec(100_000.0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, RopeSpec(10_000.0)),
        ({"llama__rope__freq_base": 7.5}, RopeSpec(7.5)),
        ({"llama__rope__scaling__factor": 4.0}, RopeSpec(10_000.0, "linear", 4.0)),
        ({"llama__rope__scale_linear": 4.0}, RopeSpec(10_000.0, "linear", 4.0)),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            RopeSpec(10_000.0, "linear", 4.0),
        ),
        (
            {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0},
            RopeSpec(10_000.0),
        ),
    ],
)
def test_gguf_rope(metadata: dict[str, Any], expected: RopeSpec, tmp_path: Path) -> None:
    assert read_spec(write_tiny(tmp_path, **metadata)).rope == expected


def test_gguf_eos_and_window(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path, tokenizer__ggml__eot_token_id=9, llama__attention__sliding_window=64
    )
    spec = read_spec(path)
    assert spec.eos_token_ids == (2, 9)
    assert (spec.max_len, spec.sliding_window, spec.windowed) == (256, 64, (True, True))


def test_gguf_head_count_may_be_a_list(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, llama__attention__head_count_kv=[2, 2])
    assert read_spec(path).num_kv_heads == 2


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"general__architecture": "gemma"}, "GGUF architecture gemma is not supported"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count = 4"),
        ({"llama__attention__value_length": 4}, "llama.attention.value_length = 4"),
        ({"llama__expert_count": 8}, "llama.expert_count = 8"),
        ({"llama__attention__causal": False}, "llama.attention.causal = False"),
        ({"llama__attention__head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\], expected one"),
        ({"llama__context_length": None}, "llama.context_length is None"),
        ({"llama__attention__layer_norm_rms_epsilon": "x"}, "epsilon is 'x', expected a number"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
        ({"llama__attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping = 50.0"),
    ],
)
def test_gguf_refused_by_name(metadata: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, **metadata)
    with pytest.raises(UnsupportedModel, match=complaint) as caught:
        read_spec(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("layers", "scale"), [(26, None), (62, (32 / 4) ** -0.5)])
def test_the_scale_of_gemma3_27b_is_known_by_its_layers(
    layers: int, scale: float | None, tmp_path: Path
) -> None:
    """The file does not say it: of all sizes it alone divides by another number than head_dim."""
    path = write_tiny(tmp_path, "gemma3", gemma3__block_count=layers)
    assert read_spec(path).attention_scale == scale


def test_gguf_gemma3_windows_of_another_period_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "gemma3", gemma3__attention__sliding_window_pattern=2)
    with pytest.raises(UnsupportedModel, match=r"sliding_window_pattern = 2 .* only 6"):
        read_spec(path)


def test_gguf_without_embedding(tmp_path: Path) -> None:
    model = make_reference("llama")
    tensors = gguf_tensors(model)
    del tensors["token_embd.weight"]
    write_gguf(tmp_path / "tiny.gguf", model, tensors)
    with pytest.raises(WeightError, match=r"tiny\.gguf: tensor 'token_embd.weight' is missing"):
        read_spec(tmp_path / "tiny.gguf")


def test_gguf_cut_off_anywhere(tmp_path: Path) -> None:
    """Every prefix of a file is refused by name, in the header or at the first missing tensor."""
    whole = write_tiny(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    sizes = [*range(0, 3000, 97), len(whole) // 2, len(whole) - 1]
    complaints = set()
    for size in sizes:
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightError) as caught:
            read_spec(cut)
        assert str(cut) in str(caught.value)
        complaints.add(str(caught.value).removeprefix(f"{cut}: ").split(" ")[0])
    assert complaints == {"not", "cut"}  # not a GGUF file, cut off
    assert "tensor '" in str(caught.value)


def test_gguf_of_another_version(tmp_path: Path) -> None:
    content = bytearray(write_tiny(tmp_path).read_bytes())
    for version, complaint in ((1, "version 1 is not one of"), (3 << 24, "big-endian")):
        content[4:8] = version.to_bytes(4, "little")
        (tmp_path / "other.gguf").write_bytes(content)
        with pytest.raises(UnsupportedModel, match=complaint):
            read_spec(tmp_path / "other.gguf")


def test_damaged_gguf_is_never_another_error(tmp_path: Path) -> None:
    """One byte of the header changed: it still reads, or an error of ours says why not."""
    whole = bytearray(write_tiny(tmp_path).read_bytes())
    odd = tmp_path / "odd.gguf"
    refused = 0
    for place in range(4, 2400, 7):
        content = bytearray(whole)
        content[place] ^= 0xFF
        odd.write_bytes(content)
        try:
            read_spec(odd)
        except ModelError:
            refused += 1
    assert refused > 50


U32, STRING, ARRAY = 4, 8, 9
BEHIND_BYTES = 1 << 26  # zeros, which are names, keys and strings of no length


def header(tensors: int, values: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest


def named(name: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name


@pytest.mark.parametrize(
    "content",
    [
        header(1, 1 << 62, b""),
        header(1, BEHIND_BYTES // 16, b""),
        header(1 << 60, 0, b""),
        header(BEHIND_BYTES // 32, 0, b""),
        header(1, 0, named(b"t") + struct.pack("<I", 1 << 22)),
        header(1, 1, named(b"k") + struct.pack("<IIQ", ARRAY, STRING, BEHIND_BYTES // 9)),
        header(1, 1, named(b"k") + struct.pack("<IIQ", ARRAY, 0, BEHIND_BYTES // 2)),
        header(1, 1, named(b"k") + struct.pack("<IIQ", ARRAY, ARRAY, BEHIND_BYTES // 13)),
        header(1, 1, named(b"k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", 9, 1) * 100_000),
        header(1, 2, (named(b"k") + struct.pack("<II", U32, 7)) * 2),
        header(2, 0, (named(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2),
    ],
)
def test_damaged_counts_cost_no_walk_through_the_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    os.truncate(path, BEHIND_BYTES)
    began_s = time.thread_time()
    with pytest.raises(WeightError, match=r"damaged\.gguf"):
        read_spec(path)
    assert time.thread_time() - began_s < 0.3  # 2 to 8 s as it was
