"""First-token times of chats that share a long system prompt: what a prefix cache is for.

    python benchmarks/chats.py --servers firn,mlx-lm,mlx-vlm,vllm-mlx --models dense,hybrid,window

Sessions have one system prompt in common (about 1,400 tokens) and a document of their own (about 1,200).
They take their turns in rotation; each turn appends the reply and a question. Then the server is stopped
with SIGTERM, started again on the same disk folder, and every session asks once more.

    cold       first token of the very first prompt
    shared     p50 of the other sessions' first turns: the system prompt is known
    later      p50 of all later turns: all except the reply's end and the question is known
    restart    p50 of the turn after the restart
    new/turn   tokens of a later turn that the server did not report as cached; new/restart likewise
    disk MB    files after the stop

`floor` is mlx-lm's own loop computing nothing but new tokens; after a restart it also reads a
session's bytes at the speed of the disk. Memory is `large` (512 MB), `half` (enough for half of the
sessions if they shared nothing) or a number of MB; several may be given.

Takes about two minutes on two cores with the defaults: half a minute for each server, model, memory and
round.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from disks import read_speed
from report import BenchError, Column, cli, names, save, table
from servers import Bare, Server, kind_of, lab, model_folder

from firn.bench.chats import (
    N_DOCUMENT_WORDS,
    N_QUESTION_WORDS,
    N_REPLY,
    N_SYSTEM_WORDS,
    Chats,
    Workload,
    p50,
    warm_up,
)
from models import CONFIGS, session_nbytes

LARGE_MB = 512
SETTLE_S = 2.0
"""Between the last answer and the stop, so that a server can finish its background writes."""
COLUMNS = (
    Column("cold_s", "cold s", 3),
    Column("shared_s", "shared s", 3),
    Column("later_s", "later s", 3),
    Column("restart_s", "restart s", 3),
    Column("later_new", "new/turn", 0, ""),
    Column("restart_new", "new/restart", 0, ""),
    Column("disk_mb", "disk MB", 1),
)


def run_server(name: str, model: Path, *, work: Workload, memory_mb: int) -> dict[str, Any]:
    chats = Chats(work)
    with Server.start(name, model, memory_mb=memory_mb) as server:
        warm_up(server.target)
        for _ in range(work.turns):
            chats.turn(server.target)
        time.sleep(SETTLE_S)
        startup_s = server.startup_s
    disk_nbytes = server.disk_nbytes()
    with Server.start(name, model, memory_mb=memory_mb, fresh=False) as server:
        warm_up(server.target)
        again = chats.turn(server.target)
        restarted_s = server.startup_s
    return chats.result() | {
        "restart_s": p50([r.first_s for r in again]),
        "restart_new": p50([float(r.n_prompt - r.n_cached) for r in again]),
        "disk_mb": disk_nbytes / 1e6 if server.cache_folders else None,
        "startup_s": startup_s,
        "restarted_s": restarted_s,
    }


def run_floor(model: Path, *, work: Workload, disk_nbytes_per_s: float) -> dict[str, Any]:
    turns = range(work.turns)
    request = {
        "kind": "chats",
        "system": work.system,
        "sessions": [[work.user(i, t) for t in turns] for i in range(work.n_sessions)],
        "n_reply": N_REPLY,
    }
    with Bare.start(model) as bare:
        result = bare.ask(request)
    later_s = p50(result["later_s"])
    load_s = _session_nbytes(model.name, work) / disk_nbytes_per_s
    return {
        "cold_s": result["cold_s"],
        "shared_s": p50(result["first_s"]),
        "later_s": later_s,
        "restart_s": None if later_s is None else later_s + load_s,
    }


def memory_mb(text: str, model: str, work: Workload) -> int:
    if text == "large":
        return LARGE_MB
    if text == "half":
        return max(round(_session_nbytes(model, work) * work.n_sessions / 2 / (1 << 20)), 1)
    if text.isdigit() and int(text):
        return int(text)
    raise BenchError(f"--memory {text}: give large, half or a number of MB")


def _session_nbytes(model: str, work: Workload) -> int:
    """Bytes of one session at its end, by the model's shape; others count as the dense model."""
    n_words = N_SYSTEM_WORDS + N_DOCUMENT_WORDS + work.turns * (N_QUESTION_WORDS + N_REPLY // 5)
    return session_nbytes(model if model in CONFIGS else "dense", 5 * n_words)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--servers", type=names, default=["firn", "mlx-lm"], metavar="A,B,..")
    options.add_argument("--models", type=names, default=["dense"], metavar="M,..")
    options.add_argument("--memory", type=names, default=["large"], metavar="large,half,MB")
    options.add_argument("--rounds", type=int, default=2, help="A B A B ..: turns of each server")
    options.add_argument("--sessions", type=int, default=6)
    options.add_argument("--turns", type=int, default=3, help="of each session, at least 2")
    options.add_argument("--no-floor", action="store_true", help="leave out mlx-lm's own loop")
    options.add_argument("--out", type=Path, help="JSON file (default: chats.json in the lab)")
    args = options.parse_args()
    if args.rounds < 1 or args.sessions < 2 or args.turns < 2:
        raise BenchError("at least one round, two sessions and two turns, please")
    work = Workload(args.sessions, args.turns)
    folders = [model_folder(name) for name in args.models]
    limits = {f: [memory_mb(m, f.name, work) for m in args.memory] for f in folders}
    versions = {name: kind_of(name).versions() for name in args.servers}
    speed = 0.0 if args.no_floor else read_speed(lab() / "run")
    results: list[dict[str, Any]] = []
    for folder in folders:
        for mb in limits[folder]:
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in args.servers}
            if not args.no_floor:
                rounds["floor"] = []
            for i in range(args.rounds):
                for name, done in rounds.items():
                    print(f"{folder.name}, {mb} MB, round {i + 1}: {name}", flush=True)
                    if name == "floor":
                        done.append(run_floor(folder, work=work, disk_nbytes_per_s=speed))
                    else:
                        done.append(run_server(name, folder, work=work, memory_mb=mb))
            title = (
                f"\n{folder.name}, {mb} MB of memory, {args.sessions} sessions, medians of rounds"
            )
            print(
                table(title, COLUMNS, rounds=rounds, references=["floor"]), end="\n\n", flush=True
            )
            results.append({"model": folder.name, "memory_mb": mb, "rounds": rounds})
    print("\n".join(versions.values()))
    result = {"versions": versions, "disk_read_bytes_per_s": speed, "results": results}
    save(args.out or lab() / "chats.json", "chats", options=vars(args), result=result)


if __name__ == "__main__":
    cli(main)
