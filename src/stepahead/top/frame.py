"""What there is to see of a server at one moment, whoever made it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Quantiles:
    """Of durations, in ms."""

    p50_ms: float
    p90_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Frame:
    """One look at a server; None, or empty, where it does not say.

    engine             its name and version
    loop               the loop and how deep it runs ahead
    verdict            the line to read first
    busy_pct           of the time with work, in which the device ran
    hidden_pct         of the host's work, what was done under a busy device
    exposed_ms         host work that the device waited for, a step
    idle_ms            of the device, a step, by cause
    in_per_s           prompt tokens, `out_per_s` output tokens
    ttft, itl          to the first token, and from token to token; of late
    running, waiting   requests; `rows` is how many can run at once
    pages_pct          of the KV pages, how many are used; `pages` is how many there are
    prefix_pct         of prompt tokens, those found in the prefix cache
    drafts_pct         of drafted tokens, those accepted, by their position in the draft
    drafts_per_step    tokens that a step with drafts gave, where no more is told
    flights, depth     steps in the air, and the most of them
    syncs              steps pulled back to serial work, by reason
    missing            what this server does not tell
    """

    engine: str
    model: str = ""
    loop: str = ""
    verdict: str = ""
    busy_pct: float | None = None
    hidden_pct: float | None = None
    exposed_ms: float | None = None
    idle_ms: dict[str, float] = field(default_factory=dict)
    in_per_s: float | None = None
    out_per_s: float | None = None
    ttft: Quantiles | None = None
    itl: Quantiles | None = None
    running: int | None = None
    waiting: int | None = None
    rows: int | None = None
    pages_pct: float | None = None
    pages: int | None = None
    prefix_pct: float | None = None
    drafts_pct: tuple[float, ...] = ()
    drafts_per_step: float | None = None
    flights: int | None = None
    depth: int | None = None
    syncs: dict[str, int] = field(default_factory=dict)
    missing: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Its JSON: every field, whatever the server says."""
        return asdict(self)
