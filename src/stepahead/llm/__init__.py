"""Offline use, and what every front end shares: prompts read, answers made of the engine's outputs.

Knows prompts, texts and answers; not what a plan says, nor where a step runs.  Loads no torch.
"""

from __future__ import annotations

from stepahead.llm.offline import LLM

__all__ = ["LLM"]
