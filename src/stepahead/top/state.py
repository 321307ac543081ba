"""Our own /state, read as a frame: what the books say is of the time between two looks."""

from __future__ import annotations

import msgspec

from stepahead.observe.figures import Totals
from stepahead.observe.verdicts import overall
from stepahead.top.fetch import Unreachable
from stepahead.top.frame import Frame, Quantiles


class _Load(msgspec.Struct):
    rows_running: int
    requests_waiting: int
    pages_free: int
    pages_evictable: int
    pages_total: int


class _Books(msgspec.Struct):
    wall_ns: int
    hidden_ns: int
    exposed_ns: int
    busy_ns: int
    idle_ns: dict[str, int]


class _Probes(msgspec.Struct):
    verdict: str
    host_computes: bool = False


class _Requests(msgspec.Struct):
    prompt_tokens: int
    cached_tokens: int


class _Latency(msgspec.Struct):
    p50_ms: float
    p90_ms: float
    p99_ms: float


class _Held(msgspec.Struct):
    steps: int


class _Rates(msgspec.Struct):
    prompt_tokens: float
    generated_tokens: float


class _Drafts(msgspec.Struct):
    drafted: int
    accepted_at: list[int]


class State(msgspec.Struct):
    """As much of the document as is shown."""

    about: dict[str, str | int]
    status: str
    load: _Load
    flights: int
    steps: int
    books: _Books
    probes: _Probes | None
    syncs: dict[str, _Held]
    requests: _Requests
    rates: _Rates
    latencies: dict[str, _Latency | None]
    drafts: _Drafts | None = None


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


_DECODER = msgspec.json.Decoder(State)


def parse(body: bytes) -> State:
    """The document; Unreachable if it is none of ours."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreachable(f"its /state is not one that can be read ({error})") from error


def why_not(body: bytes) -> str:
    """What an answer that is no state says, if it says anything."""
    try:
        return ": " + msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def frame_of(now: State, before: State | None) -> Frame:
    """The frame of `now`; shares are of the time since `before`, else since the engine's start."""
    if before is not None and (before.about != now.about or before.steps > now.steps):
        before = None  # another engine
    totals = _totals(now, before)
    told, load = totals.as_dict(), now.load
    taken = load.pages_total - load.pages_free - load.pages_evictable
    about = now.about
    return Frame(
        engine=f"stepahead {about.get('version', '')}".strip(),
        model=str(about.get("model", "")),
        loop=str(about.get("loop", "")),
        verdict=_verdict(now, totals),
        busy_pct=told["device_busy_pct"],
        hidden_pct=None if totals.host_computes else told["host_hidden_pct"],
        exposed_ms=_ms(told["exposed_us_per_step"]),
        idle_ms={cause: us / 1e3 for cause, us in told["idle_us_per_step"].items() if us},
        in_per_s=now.rates.prompt_tokens,
        out_per_s=now.rates.generated_tokens,
        ttft=_quantiles(now, "ttft"),
        itl=_quantiles(now, "itl"),
        running=load.rows_running,
        waiting=load.requests_waiting,
        rows=_whole(about.get("max_rows")),
        pages_pct=100 * taken / load.pages_total if load.pages_total else None,
        pages=load.pages_total,
        prefix_pct=_hits(now, before),
        drafts_pct=_accepted(now.drafts, before.drafts if before else None),
        flights=now.flights,
        depth=_whole(about.get("depth")),
        syncs={reason: held.steps for reason, held in now.syncs.items()},
    )


def _totals(now: State, before: State | None) -> Totals:
    """What the books have added."""
    after, start = now.books, before.books if before else _Books(0, 0, 0, 0, {})
    return Totals(
        steps=now.steps - (before.steps if before else 0),
        depth=_whole(now.about.get("depth")) or 1,
        wall_ns=max(0, after.wall_ns - start.wall_ns),
        busy_ns=max(0, after.busy_ns - start.busy_ns),
        hidden_ns=max(0, after.hidden_ns - start.hidden_ns),
        exposed_ns=max(0, after.exposed_ns - start.exposed_ns),
        blocked_ns=0,
        idle_ns={
            cause: max(0, ns - start.idle_ns.get(cause, 0)) for cause, ns in after.idle_ns.items()
        },
        stages_ns={},
        host_computes=now.probes is not None and now.probes.host_computes,
    )


def _verdict(now: State, totals: Totals) -> str:
    if now.status != "ok":
        return f"the engine has {now.status}" if now.status == "failed" else "the engine is closed"
    if totals.steps:
        return overall(totals)
    # no step has landed since the last look
    if now.load.rows_running or now.load.requests_waiting or now.flights:
        return "no step has landed of late, and requests wait"
    return f"nothing to do now; before: {now.probes.verdict}" if now.probes else "nothing to do yet"


def _hits(now: State, before: State | None) -> float | None:
    asked, found = now.requests.prompt_tokens, now.requests.cached_tokens
    if before is not None and asked > before.requests.prompt_tokens:
        asked -= before.requests.prompt_tokens
        found -= before.requests.cached_tokens
    return 100 * found / asked if asked else None


def _accepted(now: _Drafts | None, before: _Drafts | None) -> tuple[float, ...]:
    if now is None:
        return ()
    earlier = before or _Drafts(0, [0] * len(now.accepted_at))
    drafted = now.drafted - earlier.drafted
    pairs = zip(now.accepted_at, earlier.accepted_at, strict=True)
    return tuple(100 * (after - start) / drafted for after, start in pairs) if drafted else ()


def _quantiles(now: State, name: str) -> Quantiles | None:
    found = now.latencies.get(name)
    return Quantiles(found.p50_ms, found.p90_ms, found.p99_ms) if found else None


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _whole(value: str | int | None) -> int | None:
    return value if isinstance(value, int) else None
