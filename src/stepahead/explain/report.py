"""The two documents that `stepahead explain` gives: of a model here, of another engine's command.

`--json` is these structs as they stand: a field is never renamed, only added.  All counts are
whole numbers, sizes bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stepahead.explain.memory import Memory

Overlap = Literal["on", "off", "depends", "refused"]
# off      no step runs ahead
# refused  the program does not start
# held     some steps wait until the one before is retired
# late     a step runs ahead, but its sampling waits for the host
# depends  on what the command line does not say
# stays    overlap is as it was; worth knowing all the same
Effect = Literal["off", "refused", "held", "late", "depends", "stays"]


class Entry(msgspec.Struct, frozen=True):
    """A thing and what is said of it: an option and its reason, an error and its words, a flag and
    what became of it.  `value` is None where it is not settled or has no counterpart."""

    name: str
    value: Any = None
    words: str = ""


class ChoiceReport(msgspec.Struct, frozen=True):
    """A deployment choice as it stands here; `reasons` are values of `SyncReason`."""

    name: str
    title: str
    here: bool
    now: str
    overlap: str
    watch: str
    reasons: list[str]


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model in this engine; `refused` says what would keep it from starting, with the error."""

    kind: Literal["model"] = "model"
    model: str
    architecture: str
    facts: list[str]
    refused: list[Entry]
    settings: list[Entry]
    memory: Memory | None
    choices: list[ChoiceReport]


class Finding(msgspec.Struct, frozen=True):
    """What a rule of another engine makes of the flags `given`, and what one would see of it.

    `source` is the engine and the version whose rules were read.
    """

    rule: str
    effect: Effect
    given: list[str]
    words: str
    see: str
    reasons: list[str]
    source: str


class CommandReport(msgspec.Struct, frozen=True, kw_only=True):
    """Another engine's command line: what becomes of overlap, and the same wish here.

    depth          most steps launched and not yet retired; None where the rules do not say
    command        a command line of stepahead
    translated     flag -> the flag of stepahead, with a note where they differ
    no_counterpart flags that this engine has nothing for yet, and why
    not_looked_at  flags that no rule here knows, as they were given
    """

    kind: Literal["command"] = "command"
    engine: str
    version: str
    model: str | None
    overlap: Overlap
    depth: int | None
    findings: list[Finding]
    command: str
    translated: list[Entry]
    no_counterpart: list[Entry]
    not_looked_at: list[str]
    memory: Memory | None
