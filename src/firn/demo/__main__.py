"""`make demo`: what firn is for, in about a minute, on the built-in models and without any download.

A long document is read once. Then come questions about it: in several turns, after other documents
have evicted it from memory, and after the server was killed. It is never computed again. Every
answer is checked.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import openai
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.table import Table

from firn.demo.facts import FactSession, make_session, n_facts_for
from firn.demo.server import ServerProcess

DOCUMENT_TOKENS = 1500
MEMORY_MB = {"firn-demo": 3, "firn-demo-hybrid": 2}
"""Room for about two of the documents, so that a third one evicts the first."""


@dataclass(frozen=True, slots=True)
class DemoTurn:
    what: str
    answer: str
    right: bool
    n_prompt: int
    n_cached: int
    tier: str
    first_s: float


class DemoClient:
    """Asks questions through the official client and keeps the results. One per model."""

    def __init__(self, model: str, console: Console) -> None:
        self._model = model
        self._console = console
        self._asked: dict[int, int] = {}
        self.rows: list[DemoTurn] = []

    def ask(self, server: ServerProcess, session: FactSession, what: str) -> None:
        """Ask the session's next question, stream the answer to the screen and check it."""
        n = self._asked.get(id(session), 0)
        self._asked[id(session)] = n + 1
        question = session.questions[n]
        self._console.print(f"[dim]{what}:[/dim] {question.text}", highlight=False)
        before = _by_tier(server)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        messages: list[ChatCompletionMessageParam] = session.messages(n)  # type: ignore[assignment]
        began = time.perf_counter()
        first_s, answer, n_prompt, n_cached = 0.0, "", 0, 0
        stream = client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first_s = first_s or time.perf_counter() - began
                self._console.print(piece, end="", style="bold", highlight=False)
                answer += piece
            if chunk.usage and chunk.usage.prompt_tokens_details:
                n_prompt = chunk.usage.prompt_tokens
                n_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        right = answer == question.answer
        mark = "[green]right[/green]" if right else f"[red]wrong[/red]: {question.answer}"
        self._console.print(f"   {mark}", highlight=False)
        tier = _came_from(before, _by_tier(server))
        self.rows.append(DemoTurn(what, answer, right, n_prompt, n_cached, tier, first_s))


def main() -> int:
    console = Console()
    console.print("[bold]firn[/bold]: a token is computed once; a hit never changes the answer.\n")
    with tempfile.TemporaryDirectory(prefix="firn-demo-") as folder:
        models = ("firn-demo", "firn-demo-hybrid")
        rows = [row for model in models for row in show(model, Path(folder), console)]
    n_wrong = sum(not row.right for row in rows)
    cold = [r.first_s for r in rows if r.n_cached < r.n_prompt // 2]
    warm = [r.first_s for r in rows if r.n_cached >= r.n_prompt // 2]
    console.print(
        f"{len(rows) - n_wrong} of {len(rows)} answers right. First token: "
        f"{sum(cold) / len(cold):.2f} s cold, {sum(warm) / len(warm):.2f} s reused."
    )
    return 1 if n_wrong else 0


def show(model: str, folder: Path, console: Console) -> list[DemoTurn]:
    """With one model: read, reuse, evict, restore, kill the server, restore again."""
    kind = "plain attention" if model == "firn-demo" else "recurrent layers with some attention"
    console.rule(f"{model} ({kind})")
    sessions = [_session(seed) for seed in (11, 12, 13)]
    first, second, third = sessions
    log, ssd = folder / f"{model}.log", folder / f"{model}.cache"
    flags = ("--ssd-cache-dir", str(ssd), "--cache-memory-mb", str(MEMORY_MB[model]))
    client = DemoClient(model, console)
    server = ServerProcess(model, *flags, log=log)
    try:
        client.ask(server, first, "a document, never read before")
        client.ask(server, first, "the next question about it")
        client.ask(server, second, "another document")
        client.ask(server, third, "a third: memory is full")
        client.ask(server, first, "back to the first")
        _settle(server)
        console.print("[yellow]the server is killed (SIGKILL) and started again[/yellow]")
        server.kill()
        server = ServerProcess(model, *flags, log=log)
        client.ask(server, first, "the first, after a restart")
        client.ask(server, second, "the second, after a restart")
    finally:
        code = server.stop()
    console.print(_table(client.rows))
    console.print(f"[dim]The server stopped with exit code {code}.[/dim]\n")
    return client.rows


def _session(seed: int) -> FactSession:
    n_facts = n_facts_for(DOCUMENT_TOKENS)
    return make_session(seed, n_facts=n_facts, n_questions=6, kinds=("fact",), placement="system")


def _settle(server: ServerProcess) -> None:
    """Wait until everything committed is on the SSD: a kill loses at most the last seconds."""
    written = -1
    for _ in range(40):
        seen = server.get("/v1/cache/stats")["ssd"]["records"]
        if seen == written:
            return
        written = seen
        time.sleep(0.25)


def _by_tier(server: ServerProcess) -> dict[str, int]:
    by_tier: dict[str, int] = server.get("/v1/cache/stats")["tokens"]["by_tier"]
    return by_tier


def _came_from(before: dict[str, int], after: dict[str, int]) -> str:
    used = [tier for tier in after if after[tier] > before.get(tier, 0)]
    return " + ".join({"memory": "memory", "ssd": "SSD"}[tier] for tier in used) or "computed"


def _table(rows: list[DemoTurn]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "prompt", "reused", "from", "first token", "answer"):
        table.add_column(
            name, justify="right" if name in ("prompt", "reused", "first token") else "left"
        )
    for row in rows:
        mark = "[green]right[/green]" if row.right else "[red]wrong[/red]"
        table.add_row(
            row.what, str(row.n_prompt), str(row.n_cached), row.tier, f"{row.first_s:.2f} s", mark
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
