"""`firn bench`: names, flags and help texts. The work is in work.py and firn.bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firn.cli.options.parameters import (
    DEFAULT_URL,
    ApiKey,
    Command,
    Guard,
    TraceArgument,
    Url,
    command_group,
)

Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare",
        help="Measure two servers in turns, with ratios of the first to the second.",
        metavar="URL URL",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Model to ask for (otherwise the first that the server lists); twice with --compare, "
        "if the names differ.",
        metavar="NAME",
    ),
]
Rounds = Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1, metavar="N")]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write every round to this file; - for stdout.", metavar="FILE"),
]


def bench_app(guarded: Guard) -> typer.Typer:
    commands: dict[str, Command] = {
        "chats": _chats,
        "throughput": _throughput,
        "replay": _replay,
    }
    return command_group("Measure any server that speaks OpenAI's chat API.", commands, guarded)


def _chats(
    url: Url = DEFAULT_URL,
    compare: Compare = None,
    model: Models = None,
    api_key: ApiKey = None,
    rounds: Rounds = 3,
    sessions: Annotated[int, typer.Option(help="Chats in rotation.", min=2, metavar="N")] = 6,
    turns: Annotated[int, typer.Option(help="Turns of each chat.", min=2, metavar="N")] = 3,
    json: Json = None,
) -> None:
    """Time to first token of chats that share a system prompt: cold, shared, later turns."""
    from firn.cli.bench.work import BenchTargets, chats

    servers = BenchTargets(url, compare, model, api_key, json)
    chats(servers, rounds=rounds, sessions=sessions, turns=turns)


def _throughput(
    url: Url = DEFAULT_URL,
    compare: Compare = None,
    model: Models = None,
    api_key: ApiKey = None,
    rounds: Rounds = 3,
    concurrency: Annotated[
        str,
        typer.Option(help="Numbers of concurrent streams, separated by commas.", metavar="N,M,.."),
    ] = "1,4,16",
    requests: Annotated[
        int, typer.Option(help="Requests of each stream in a round.", min=1, metavar="N")
    ] = 3,
    no_gap: Annotated[
        bool,
        typer.Option("--no-gap", help="Skip the long prompt that arrives while others generate."),
    ] = False,
    json: Json = None,
) -> None:
    """Tokens per second by number of streams, and the longest pause while a long prompt arrives."""
    from firn.cli.bench.work import BenchTargets, throughput

    servers = BenchTargets(url, compare, model, api_key, json)
    throughput(servers, rounds=rounds, concurrency=concurrency, requests=requests, gap=not no_gap)


def _replay(
    trace: TraceArgument,
    url: Url = DEFAULT_URL,
    compare: Compare = None,
    model: Models = None,
    api_key: ApiKey = None,
    rounds: Rounds = 1,
    requests: Annotated[
        int, typer.Option(help="Play only the first N requests; 0 for all.", min=0, metavar="N")
    ] = 100,
    speed: Annotated[
        float,
        typer.Option(
            help="Speed relative to the trace; 0 plays it without pauses.",
            min=0,
            metavar="X",
        ),
    ] = 0.0,
    streams: Annotated[int, typer.Option(help="Concurrent requests.", min=1, metavar="N")] = 4,
    max_prompt: Annotated[
        int, typer.Option(help="Cut longer prompts, in tokens.", min=16, metavar="N")
    ] = 32_768,
    max_reply: Annotated[
        int, typer.Option(help="Longest reply, in tokens.", min=1, metavar="N")
    ] = 64,
    trace_model: Annotated[
        str | None,
        typer.Option(help="Only this model's requests, if the trace has several.", metavar="NAME"),
    ] = None,
    json: Json = None,
) -> None:
    """Play a trace with made-up text that shares prefixes as the trace does."""
    from firn.bench.replay import ReplayPace
    from firn.cli.bench.work import BenchTargets, replay

    servers = BenchTargets(url, compare, model, api_key, json)
    pace = ReplayPace(speed, streams, max_prompt, max_reply)
    replay(servers, trace, rounds=rounds, requests=requests, pace=pace, trace_model=trace_model)
