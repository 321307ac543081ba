"""What a configuration does to overlap, in words: this engine's, SGLang's or vLLM's.

Facts are tables (`choices`, `vllm`, `sglang`, the flags), sums are functions (`memory`, `glm`),
words for people are made in `render` alone.  Loads no weights and no torch.
"""
