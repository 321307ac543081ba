"""The front door: an OpenAI-compatible server in front of an engine in a process of its own.

Knows HTTP, texts and answers; not what a plan says, nor where a step runs.  Loads no torch.
"""
