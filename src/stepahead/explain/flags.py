"""Other engines' flags: how each is spelt, whether a value follows, what it is here.

Two tables, `VLLM` and `SGLANG`.  A flag that is in neither is "not looked at".  Those that our
commands take under the same name, or as an alias, are marked in docs/serving.md; for the others
`counterpart` has the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Takes = Literal["value", "number", "json", "many", "nothing"]

_GRAMMARS = "grammars are llguidance's, and need no options"
_PROXY = "a proxy in front does that"
_LOGGED = "requests are not logged; request_spans exports them"
_ONE_DEVICE = "one rank so far"
_NOT_NEEDED = "nothing here depends on it"
_DRAFTS = "drafts are asked for with --draft ngram or mtp"
_KERNELS = "the attention that fits the device is taken"


@dataclass(frozen=True)
class Flag:
    """`names` are its spellings, the first the one it is known by; `to` is our option, if there is
    one, and `why` how that differs; else `why` says why there is none."""

    names: tuple[str, ...]
    takes: Takes = "value"
    to: str | None = None
    why: str = ""


def _no(why: str, *names: str, takes: Takes = "value") -> Flag:
    return Flag(names, takes, None, why)


def _as(to: str, *names: str, takes: Takes = "number", why: str = "") -> Flag:
    return Flag(names, takes, to, why)


VLLM: tuple[Flag, ...] = (
    _as("model", "--model", takes="value"),
    _as("loop", "--async-scheduling", takes="nothing", why="overlap, or batch-queue"),
    _as("loop", "--no-async-scheduling", takes="nothing", why="serial"),
    _as("max_rows", "--max-num-seqs"),
    _as("max_step_tokens", "--max-num-batched-tokens"),
    _as("page_size", "--block-size"),
    _as("max_model_len", "--max-model-len"),
    _as("num_pages", "--num-gpu-blocks-override"),
    _as("kv_memory_gb", "--kv-cache-memory-bytes", why="in GiB"),
    _as("prefix_cache", "--enable-prefix-caching", takes="nothing"),
    _as("prefix_cache", "--no-enable-prefix-caching", takes="nothing"),
    _as("seed", "--seed"),
    _as("dtype", "--dtype", takes="value"),
    _as("chat_template", "--chat-template", takes="value"),
    _no("memory is given in GiB, with kv_memory_gb", "--gpu-memory-utilization"),
    _no(_ONE_DEVICE, "--tensor-parallel-size", "-tp", takes="number"),
    _as("pipeline_stages", "--pipeline-parallel-size", "-pp"),
    _no(_ONE_DEVICE, "--data-parallel-size", "-dp", takes="number"),
    _no(_ONE_DEVICE, "--data-parallel-size-local", "-dpl", takes="number"),
    _no(_ONE_DEVICE, "--data-parallel-address", "-dpa"),
    _no(_ONE_DEVICE, "--enable-expert-parallel", "-ep", takes="nothing"),
    _no(_ONE_DEVICE, "--enable-dbo", takes="nothing"),
    _no(_ONE_DEVICE, "--all2all-backend"),
    _no(_ONE_DEVICE, "--enable-eplb", takes="nothing"),
    _no(_ONE_DEVICE, "--nnodes", takes="number"),
    _no(_DRAFTS, "--speculative-config", "-sc", takes="json"),
    _no(_DRAFTS, "--spec-method"),
    _no(_DRAFTS, "--spec-model"),
    _no(_DRAFTS, "--spec-tokens", takes="number"),
    _no("the scheduler is not exchanged", "--scheduler-cls"),
    _no("requests are served as they come", "--scheduling-policy"),
    _no("long prompts always run in chunks", "--enable-chunked-prefill", takes="nothing"),
    _no("long prompts always run in chunks", "--no-enable-chunked-prefill", takes="nothing"),
    _no("the runner has a process of its own", "--distributed-executor-backend"),
    _no("no models that only embed; /v1/embeddings pools the states of the one served", "--runner"),
    _no(
        "no models that only embed; /v1/embeddings pools the states of the one served", "--convert"
    ),
    _no("no models that only embed; /v1/embeddings pools the states of the one served", "--task"),
    _no("KV is kept in dtype", "--kv-cache-dtype"),
    _as("quantization", "--quantization", "-q", takes="value"),
    _no("prefill and decode share an engine", "--kv-transfer-config", takes="json"),
    _no(_GRAMMARS, "--structured-outputs-config", takes="json"),
    _no("on CUDA steps are captured as graphs", "--enforce-eager", takes="nothing"),
    _no("on CUDA steps are captured as graphs", "--compilation-config", "-cc", takes="json"),
    _no(_KERNELS, "--attention-backend"),
    _as("device", "--device", takes="value"),
    _no(_NOT_NEEDED, "--trust-remote-code", takes="nothing"),
    _no("a model is a folder or a file", "--revision"),
    _no("a model is a folder or a file", "--download-dir"),
    _no("the files say their format", "--load-format"),
    _no("the tokenizer is the model's", "--tokenizer"),
    _no("a file of options is not read here", "--config"),
    _as(
        "logits_processor",
        "--logits-processors",
        takes="many",
        why="one, with the interface of usage.md",
    ),
    _as("host", "--host", takes="value"),
    _as("port", "--port"),
    _as("api_key", "--api-key", takes="many"),
    _as("served_name", "--served-model-name", takes="many"),
    _as("allow_origins", "--allowed-origins", takes="value"),
    _as("shutdown_timeout", "--shutdown-timeout", takes="value"),
    _no("one process speaks HTTP", "--api-server-count", "-asc", takes="number"),
    _as("tool_call_parser", "--tool-call-parser", takes="value"),
    _as("reasoning_parser", "--reasoning-parser", takes="value"),
    _no("tools are always taken", "--enable-auto-tool-choice", takes="nothing"),
    _no(_PROXY, "--ssl-keyfile"),
    _no(_PROXY, "--ssl-certfile"),
    _no(_PROXY, "--root-path"),
    _no(_LOGGED, "--enable-log-requests", takes="nothing"),
    _no(_LOGGED, "--no-enable-log-requests", takes="nothing"),
    _no(_LOGGED, "--disable-log-requests", takes="nothing"),
    _no(_LOGGED, "--uvicorn-log-level"),
    _no("metrics are always shown", "--disable-log-stats", takes="nothing"),
    _no("no adapters", "--enable-lora", takes="nothing"),
    _no("texts only", "--limit-mm-per-prompt", takes="json"),
    _no("the pool is on the device alone", "--cpu-offload-gb"),
    _no("the pool is on the device alone", "--swap-space"),
)

SGLANG: tuple[Flag, ...] = (
    _as("model", "--model-path", "--model", takes="value"),
    _as("loop", "--disable-overlap-schedule", takes="nothing", why="serial"),
    _as("max_rows", "--max-running-requests"),
    _as("max_step_tokens", "--chunked-prefill-size"),
    _as("page_size", "--page-size"),
    _as("max_model_len", "--context-length"),
    _as("num_pages", "--max-total-tokens", why="in pages"),
    _as("prefix_cache", "--disable-radix-cache", takes="nothing"),
    _as("seed", "--random-seed"),
    _as("dtype", "--dtype", takes="value"),
    _as("device", "--device", takes="value"),
    _as("chat_template", "--chat-template", takes="value"),
    _no("memory is given in GiB, with kv_memory_gb", "--mem-fraction-static"),
    _no("max_step_tokens bounds every step", "--max-prefill-tokens", takes="number"),
    _no("every step may mix", "--enable-mixed-chunk", takes="nothing"),
    _no(_ONE_DEVICE, "--tensor-parallel-size", "--tp-size", "--tp", takes="number"),
    _as("pipeline_stages", "--pipeline-parallel-size", "--pp-size", "--pp"),
    _no(_ONE_DEVICE, "--pp-async-batch-depth", takes="number"),
    _no(_ONE_DEVICE, "--pp-max-micro-batch-size", takes="number"),
    _no(_ONE_DEVICE, "--data-parallel-size", "--dp-size", "--dp", takes="number"),
    _no(_ONE_DEVICE, "--expert-parallel-size", "--ep-size", "--ep", takes="number"),
    _no(_ONE_DEVICE, "--enable-dp-attention", takes="nothing"),
    _no(_ONE_DEVICE, "--moe-a2a-backend"),
    _no(_ONE_DEVICE, "--deepep-mode"),
    _no(_ONE_DEVICE, "--enable-two-batch-overlap", takes="nothing"),
    _no(_ONE_DEVICE, "--nnodes", takes="number"),
    _no(_ONE_DEVICE, "--node-rank", takes="number"),
    _no(_ONE_DEVICE, "--dist-init-addr"),
    _no(_DRAFTS, "--speculative-algorithm", "--speculative-algo"),
    _as("draft_tokens", "--speculative-num-steps"),
    _no(_DRAFTS, "--speculative-eagle-topk", takes="number"),
    _no(_DRAFTS, "--speculative-num-draft-tokens", takes="number"),
    _no(_DRAFTS, "--speculative-draft-model-path"),
    _no(_GRAMMARS, "--grammar-backend"),
    _no("prefill and decode share an engine", "--disaggregation-mode"),
    _no("prefill and decode share an engine", "--disaggregation-transfer-backend"),
    _no("prefill and decode share an engine", "--enable-pdmux", takes="nothing"),
    _no("no recurrent caches", "--mamba-radix-cache-strategy", "--mamba-scheduler-strategy"),
    _no("no diffusion models", "--dllm-algorithm"),
    _no(
        "no models that only embed; /v1/embeddings pools the states of the one served",
        "--is-embedding",
        takes="nothing",
    ),
    _no("each request asks for itself", "--enable-return-hidden-states", takes="nothing"),
    _no("KV is kept in dtype", "--kv-cache-dtype"),
    _as("quantization", "--quantization", takes="value"),
    _as("batch_invariant", "--enable-deterministic-inference", takes="nothing"),
    _no("on CUDA steps are captured as graphs", "--disable-cuda-graph", takes="nothing"),
    _no("on CUDA steps are captured as graphs", "--cuda-graph-max-bs", takes="number"),
    _no(_KERNELS, "--attention-backend"),
    _no("requests are served as they come", "--schedule-policy"),
    _no("requests are served as they come", "--schedule-conservativeness"),
    _no("the pool is on the device alone", "--enable-hierarchical-cache", takes="nothing"),
    _no(_NOT_NEEDED, "--trust-remote-code", takes="nothing"),
    _no("a model is a folder or a file", "--revision"),
    _no("the files say their format", "--load-format"),
    _no("the tokenizer is the model's", "--tokenizer-path"),
    _no("a file of options is not read here", "--config"),
    _no("code in a request is not run", "--enable-custom-logit-processor", takes="nothing"),
    _as("host", "--host", takes="value"),
    _as("port", "--port"),
    _as("api_key", "--api-key", takes="value"),
    _as("served_name", "--served-model-name", takes="value"),
    _as("max_waiting", "--max-queued-requests"),
    _no("metrics are always shown", "--enable-metrics", takes="nothing"),
    _as("tool_call_parser", "--tool-call-parser", takes="value"),
    _as("reasoning_parser", "--reasoning-parser", takes="value"),
    _no(_PROXY, "--ssl-keyfile"),
    _no(_PROXY, "--ssl-certfile"),
    _no(_LOGGED, "--log-requests", takes="nothing"),
    _no(_LOGGED, "--log-level"),
    _no("every token is told at once", "--stream-interval", takes="number"),
    _no("the pool is on the device alone", "--cpu-offload-gb", takes="number"),
    _no("no adapters", "--enable-lora", takes="nothing"),
    _no("no adapters", "--lora-paths", takes="many"),
)

ENGINES = {"vLLM": VLLM, "SGLang": SGLANG}


def counterpart(word: str) -> str | None:
    """What to give here in place of another engine's flag, or why there is nothing; None for a word
    that is no flag of theirs."""
    spelt = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
    found = {name: flag for name, table in ENGINES.items() for flag in table if spelt in flag.names}
    if not found:
        return None
    flag, owners = next(iter(found.values())), " and ".join(f"{name}'s" for name in found)
    if flag.to is None:
        return f"{word} is {owners}, and there is no such option here: {flag.why}; leave it out"
    ours = "MODEL" if flag.to == "model" else "--" + flag.to.replace("_", "-")
    differs = f" ({flag.why})" if flag.why else ""
    return f"{word} is {owners}; the option here is {ours}{differs}"
