"""Rules of other engines: a condition on the words, and what it does to overlap.

Knows how rules are laid over a command line, and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepahead.explain.report import Effect, Finding, Overlap
from stepahead.explain.words import Words
from stepahead.sync import SyncReason

DEFAULT = "default"  # the rule that says what holds if no other does


@dataclass(frozen=True)
class Rule:
    """`flags`: the first spellings of the flags and variables it looks at, to be told as given.

    `asked` replaces `effect` where the user demanded overlap by name, as far as that differs.
    """

    name: str
    flags: tuple[str, ...]
    when: Callable[[Words], bool]
    effect: Effect
    words: str
    see: str
    reasons: tuple[SyncReason, ...] = ()
    asked: Effect | None = None


def findings_of(words: Words, rules: Sequence[Rule], asked: bool, source: str) -> list[Finding]:
    """What every rule that holds has to say; what decides comes first."""
    found = [_finding(words, rule, asked, source) for rule in rules if rule.when(words)]
    return sorted(found, key=lambda finding: _FIRST.get(finding.effect, len(_FIRST)))


_FIRST: dict[Effect, int] = {"refused": 0, "off": 1, "depends": 2}


def _finding(words: Words, rule: Rule, asked: bool, source: str) -> Finding:
    return Finding(
        rule.name,
        rule.asked or rule.effect if asked else rule.effect,
        words.written(*rule.flags),
        rule.words,
        rule.see,
        [reason.value for reason in rule.reasons],
        source,
    )


def that_matter(findings: Sequence[Finding], overlap: Overlap, depth: int | None) -> list[Finding]:
    """Without those about steps that run ahead, where none does."""
    if overlap in ("on", "depends"):
        return list(findings)
    ahead = overlap == "off" and depth is not None and depth > 1
    return [f for f in findings if f.rule != DEFAULT and (ahead or f.effect not in _AHEAD)]


_AHEAD: tuple[Effect, ...] = ("held", "late")


def overlap_of(findings: Sequence[Finding]) -> Overlap:
    """What is left of overlap: the strongest of them decides."""
    effects = {finding.effect for finding in findings}
    if "refused" in effects:
        return "refused"
    if "off" in effects:
        return "off"
    return "depends" if "depends" in effects else "on"
