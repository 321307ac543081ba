"""`stepahead top`: a running engine or server, live in the terminal.  Loads no torch."""

from __future__ import annotations

import json as json_text
import time
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from stepahead.errors import ConfigError, StepaheadError
from stepahead.top.fetch import Unreachable, base_url
from stepahead.top.frame import Frame
from stepahead.top.keys import Keys
from stepahead.top.live import LONGEST_S, SHORTEST_S, watch
from stepahead.top.mock import MockSource
from stepahead.top.source import Server, Source
from stepahead.top.view import History, view

_TIMEOUT_S = 10.0  # an engine in a long step says so after five


def top(
    url: str = "http://127.0.0.1:9100",
    /,
    *,
    once: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    interval: float = 1.0,
    mock: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Shows a running engine or server.

    Parameters
    ----------
    url
        A URL, host:port or a port.
    once
        Show one frame and end; it takes one interval, because rates need two looks.
    json
        With --once: the frame as one line of JSON.
    interval
        Seconds between two looks.
    mock
        Show a sample; no server is asked.
    """
    if json and not once:
        raise ConfigError("--json shows one frame; add --once")
    if not SHORTEST_S <= interval <= LONGEST_S:
        raise ConfigError(f"--interval {interval:g}; give {SHORTEST_S:g} to {LONGEST_S:g} seconds")
    source: Source = MockSource() if mock else Server(base_url(url), _TIMEOUT_S)
    console = Console()
    if once:
        _show_once(source, interval, json, console)
    elif console.is_terminal:
        _live(source, interval, console)
    else:
        raise ConfigError("the output is no terminal; add --once for one frame")
    return 0


def _live(source: Source, interval_s: float, console: Console) -> None:
    with Keys() as keys:
        try:
            watch(source, interval_s, keys, console)
        except KeyboardInterrupt as stop:
            if type(stop) is not KeyboardInterrupt:  # another signal than Ctrl-C
                raise


def _show_once(source: Source, interval_s: float, as_json: bool, console: Console) -> None:
    try:
        frame, history = _two_looks(source, interval_s)
    except Unreachable as error:
        raise StepaheadError(
            f"nothing to see at {source.place}: {error}. Start an engine there, as in "
            "`stepahead run MODEL ... --observe 9100`, or name a server of stepahead, vLLM or "
            "SGLang: `stepahead top HOST:PORT`"
        ) from error
    if as_json:
        print(json_text.dumps({"url": source.place} | frame.as_dict()))
    else:
        console.print(view(frame, history, source.place))


def _two_looks(source: Source, interval_s: float) -> tuple[Frame, History]:
    history = History()
    history.add(source.look())
    time.sleep(interval_s)
    frame = source.look()
    history.add(frame)
    return frame, history
