"""First-token times of chats that share a long system prompt: the work of a prefix cache.

    python benchmarks/chats.py --servers firn,mlx-lm,mlx-vlm,vllm-mlx --models dense,hybrid,window

Sessions have one system prompt in common (about 1,400 tokens) and a document of their own (about 1,200).
They take their turns in rotation; each turn appends the reply and a question. Then the server is stopped
with SIGTERM, started again on the same disk folder, and every session asks once more.

    cold       first token of the very first prompt
    shared     p50 of the other sessions' first turns: the system prompt is known
    later      p50 of all later turns: everything but the reply's end and the question is known
    restart    p50 of the turn after the restart
    new/turn   tokens of a later turn that the server did not report as cached; new/restart likewise
    disk MB    files after the stop

`floor` is mlx-lm's own loop computing nothing but new tokens; after a restart it also reads a session's
bytes at the speed of the disk. Memory is `large` (512 MB), `half` (what half of the sessions take, each
by itself) or a number of MB; several may be given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disks import read_speed
from report import BenchError, Column, cli, names, save, table
from servers import Bare, Message, Reply, Server, kind_of, lab, model_folder, words

from models import CONFIGS, session_nbytes

N_SYSTEM_WORDS, N_DOCUMENT_WORDS, N_QUESTION_WORDS = 300, 250, 20
N_REPLY = 16
LARGE_MB = 512
SETTLE_S = 2.0
"""Between the last answer and the stop: what a server writes behind may be written."""
COLUMNS = (
    Column("cold_s", "cold s", 3),
    Column("shared_s", "shared s", 3),
    Column("later_s", "later s", 3),
    Column("restart_s", "restart s", 3),
    Column("later_new", "new/turn", 0, ""),
    Column("restart_new", "new/restart", 0, ""),
    Column("disk_mb", "disk MB", 1),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What all servers are asked. `turns` counts those before the restart."""

    n_sessions: int
    turns: int

    @property
    def system(self) -> Message:
        return {"role": "system", "content": words(N_SYSTEM_WORDS, seed="system")}

    def user(self, session: int, turn: int) -> Message:
        if turn == 0:
            text = words(N_DOCUMENT_WORDS, seed=("document", session)) + " Summarise."
        else:
            text = words(N_QUESTION_WORDS, seed=("question", session, turn)) + " Go on."
        return {"role": "user", "content": text}


def run_server(name: str, model: Path, *, work: Workload, memory_mb: int) -> dict[str, Any]:
    sessions = [[work.system] for _ in range(work.n_sessions)]
    asked: list[list[Reply]] = []
    with Server.start(name, model, memory_mb=memory_mb) as server:
        _warm_up(server)
        for turn in range(work.turns):
            asked.append(_turn(server, sessions, work=work, turn=turn))
        time.sleep(SETTLE_S)
        startup_s = server.startup_s
    disk_nbytes = server.disk_nbytes()
    with Server.start(name, model, memory_mb=memory_mb, fresh=False) as server:
        _warm_up(server)
        again = _turn(server, sessions, work=work, turn=work.turns)
        restarted_s = server.startup_s
    first, later = asked[0], [r for replies in asked[1:] for r in replies]
    return {
        "cold_s": first[0].first_s,
        "shared_s": _p50([r.first_s for r in first[1:]]),
        "later_s": _p50([r.first_s for r in later]),
        "restart_s": _p50([r.first_s for r in again]),
        "later_new": _p50([float(r.n_prompt - r.n_cached) for r in later]),
        "restart_new": _p50([float(r.n_prompt - r.n_cached) for r in again]),
        "disk_mb": disk_nbytes / 1e6 if server.cache_folders else None,
        "startup_s": startup_s,
        "restarted_s": restarted_s,
        "first_s": [[r.first_s for r in replies] for replies in (*asked, again)],
        "prompt_tokens": [[r.n_prompt for r in replies] for replies in (*asked, again)],
        "cached_tokens": [[r.n_cached for r in replies] for replies in (*asked, again)],
    }


def _warm_up(server: Server) -> None:
    server.chat([{"role": "user", "content": "Hello."}], 2)


def _turn(
    server: Server, sessions: list[list[Message]], *, work: Workload, turn: int
) -> list[Reply]:
    """One turn of every session, which grows by the question and the reply."""
    replies = []
    for i, messages in enumerate(sessions):
        messages.append(work.user(i, turn))
        reply = server.chat(messages, N_REPLY)
        messages.append({"role": "assistant", "content": reply.text})
        replies.append(reply)
    return replies


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
    later_s = _p50(result["later_s"])
    load_s = _session_nbytes(model.name, work) / disk_nbytes_per_s
    return {
        "cold_s": result["cold_s"],
        "shared_s": _p50(result["first_s"]),
        "later_s": later_s,
        "restart_s": None if later_s is None else later_s + load_s,
    }


def _p50(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def memory_mb(text: str, model: str, work: Workload) -> int:
    if text == "large":
        return LARGE_MB
    if text == "half":
        return max(round(_session_nbytes(model, work) * work.n_sessions / 2 / (1 << 20)), 1)
    if text.isdigit() and int(text):
        return int(text)
    raise BenchError(f"--memory {text}: give large, half or a number of MB")


def _session_nbytes(model: str, work: Workload) -> int:
    """One session at its end, by the model's shape; other models are taken for the dense one."""
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
