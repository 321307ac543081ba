"""Both documents as text for people.  Knows rich and the documents, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepahead.explain.memory import Memory
from stepahead.explain.report import CommandReport, Entry, ModelReport

_UNSETTLED = "not settled"
_OVERLAP = {
    "on": "overlap is on",
    "off": "overlap is off",
    "depends": "whether overlap is on depends on what the command line does not say",
    "refused": "it does not start",
}


def model_text(report: ModelReport) -> RenderableType:
    """A model in this engine."""
    parts: list[RenderableType] = [
        Text.assemble((report.model, "bold"), f"  {report.architecture}")
    ]
    parts += [_hanging(line) for line in report.facts]
    if report.refused:
        parts.append(_section("What would be refused"))
        parts += [_pair(entry.name, entry.words, "red") for entry in report.refused]
    parts += [_section("Configuration"), _settings(report.settings)]
    if report.memory is not None:
        parts += _memory(report.memory)
        parts.append(_hanging("this engine uses one GPU so far"))
    parts.append(_section("Deployment choices, and what they do to overlap"))
    parts.append(_choices(report))
    return Group(*parts)


def command_text(report: CommandReport) -> RenderableType:
    """Another engine's command line."""
    depth = "" if report.depth is None else f", D = {report.depth}"
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{report.engine} {report.version}", "bold"),
            f"  {report.model or 'no model found'}: ",
            (f"{_OVERLAP[report.overlap]}{depth}", "bold"),
        ),
        _section(f"What its rules do (read from {report.engine} {report.version})"),
        _findings(report),
        _section("The same wish here"),
        _hanging(report.command, "bold"),
        _entries(report.translated),
    ]
    if report.no_counterpart:
        parts += [_section("No counterpart yet"), _entries(report.no_counterpart)]
    if report.not_looked_at:
        parts.append(_section("Not looked at"))
        parts += [_hanging(text) for text in report.not_looked_at]
    if report.memory is not None:
        parts += _memory(report.memory)
    return Group(*parts)


def _section(title: str) -> Text:
    return Text(f"\n{title}", style="bold cyan")


def _hanging(text: str, style: str = "") -> RenderableType:
    return Padding(Text(text, style=style), (0, 0, 0, 2))


def _pair(name: str, words: str, style: str = "bold") -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(f"  {name}:", style=style), Text(words))
    return table


def _lined(**ratios: int) -> Table:
    table = Table(show_lines=True, expand=True)
    for title, ratio in ratios.items():
        table.add_column(title, ratio=ratio, overflow="fold")
    return table


def _columns(count: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for _ in range(count):
        table.add_column(overflow="fold")
    return table


def _settings(entries: list[Entry]) -> RenderableType:
    table = _columns(3)
    for entry in entries:
        shown = _UNSETTLED if entry.value is None else str(entry.value)
        table.add_row(Text(f" {entry.name}"), Text(shown, style="bold"), Text(entry.words))
    return table


def _entries(entries: list[Entry]) -> RenderableType:
    table = _columns(2)
    for entry in entries:
        became = "" if entry.value is None else f"-> {entry.value}"
        words = f"{became} ({entry.words})" if became and entry.words else became or entry.words
        table.add_row(Text(f" {entry.name}"), Text(words))
    return table


def _choices(report: ModelReport) -> RenderableType:
    table = _lined(choice=3, here=5, overlap=8, watch=5)
    for choice in report.choices:
        here = Text(choice.now, style="" if choice.here else "dim")
        watch = Text(f"{choice.watch}\n{_counted(choice.reasons)}")
        table.add_row(Text(choice.title, style="bold"), here, Text(choice.overlap), watch)
    return table


def _counted(reasons: list[str]) -> str:
    return f"sync: {', '.join(reasons)}" if reasons else "sync: none"


def _findings(report: CommandReport) -> RenderableType:
    table = _lined(rule=5, effect=2, why=8, see=5)
    for finding in report.findings:
        given = "".join(f"\n{text}" for text in finding.given)
        here = f"\n(here sync: {', '.join(finding.reasons)})" if finding.reasons else ""
        table.add_row(
            Text.assemble((finding.rule, "bold"), given),
            Text(finding.effect),
            Text(finding.words),
            Text(f"{finding.see}{here}"),
        )
    return table


def _memory(memory: Memory) -> list[RenderableType]:
    return [
        _section(f"Memory: {_many(memory.parameters)} parameters"),
        *(_hanging(line) for line in _memory_lines(memory)),
        *([_fits(memory)] if memory.fits else []),
    ]


def _many(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _memory_lines(memory: Memory) -> Iterator[str]:
    sizes = (f"{size.bytes / 1e9:,.1f} GB as {size.dtype}" for size in memory.weights)
    yield f"weights: {', '.join(sizes)}"
    for cache in memory.cache:
        drafts = cache.draft_bytes_per_token
        more = f" and {drafts:,} for MTP" if drafts else ""
        yield (
            f"KV as {cache.dtype}: {cache.bytes_per_token:,} bytes a token{more}; "
            f"{cache.longest_bytes / 1e9:,.1f} GB at full length"
        )


def _fits(memory: Memory) -> RenderableType:
    title = f" the fewest GPUs, {memory.usable_share:.0%} of each used, KV as bfloat16"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), show_edge=False)
    for name in ("weights", "GPU", "GPUs", "weights each", "KV tokens, TP", "KV tokens, DP + EP"):
        side = "left" if name in ("weights", "GPU") else "right"
        table.add_column(name, justify=side, overflow="fold")
    for fit in memory.fits:
        spread = "-" if fit.cache_tokens_dp_ep is None else f"{fit.cache_tokens_dp_ep:,}"
        each = f"{fit.weight_bytes_per_gpu / 1e9:,.1f} GB"
        row = (fit.weights, fit.gpu, str(fit.gpus), each, f"{fit.cache_tokens:,}", spread)
        table.add_row(*row)
    return table
