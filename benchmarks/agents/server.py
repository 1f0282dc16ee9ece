"""firn on a tiny random model with scripted replies: a server for real agents to work with.

    python benchmarks/agents/server.py --folder LAB --script FILE [--template FILE] [flags of serve]

This is `firn serve` except for one thing: each reply is forced, token by token, to what the script
says. A random model then calls tools like a trained one, and its replies come back in the next
prompt as the same tokens. What is computed, cached and logged is the server's own doing.

The script is {"turn": "name", "needs": "text", "[mark]": ["reply", ...], ...} and is read again for
each prompt. A prompt that contains the needed text belongs to the first mark that it contains, and
gets that mark's next reply of this turn, or the last one again. Others (titles, summaries) get
"Fine." For each prompt a line of JSON is appended to LAB/jobs.jsonl: its request, turn, mark and
reply, the reply length that it asked for, and how many leading tokens it shares with an earlier
prompt of that mark and its reply.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import models
from firn import app
from firn.cli.commands import make_cli
from firn.config import Config
from firn.core.values import Job

SMALL = models.CONFIGS["dense"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Agents begin with 30,000 tokens, whose meaning does not matter here."""
ENOUGH = "Fine."


def write_model(folder: Path, template: Path | None) -> Path:
    """Writes a model with plain attention, 131,072 tokens of context and a chat template: by
    default that of the built-in models, which supports tools."""
    if not (folder / "config.json").exists():
        models.write_model(folder, SMALL, seed=7)
    builtin = resources.files("firn.demo") / "models" / "firn-demo" / "chat_template.jinja"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (template or builtin).read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Scripted:
    """The engine with scripted replies. Everything else is the engine's own."""

    def __init__(self, engine: Any, tokenizer: Any, *, script: Path, jobs: Path) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._script = script
        self._jobs = jobs
        self._n_said: Counter[tuple[str, str]] = Counter()
        self._texts: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: Job) -> None:
        text = self._tokenizer.decode(job.prompt.ids.tolist())
        turn, mark, number, reply = self._next_reply(text)
        tokens = [*self._tokenizer.encode(reply, add_special=False), min(self._tokenizer.eos)]
        line = {"request": job.id, "turn": turn, "mark": mark, "reply": number}
        line |= {"max_tokens": job.max_tokens, "shared": self._shared(turn, mark, job, tokens)}
        with self._jobs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if mark:  # to see where two prompts differ that should not
            name = f"prompt-{turn}-{mark.strip('[]')}-{number}.txt".replace(" ", "-")
            (self._jobs.parent / name).write_text(text, encoding="utf-8")

        def both(_: Any) -> None:  # runs between two steps: no token is picked before it is forced
            self._engine.submit(job)
            self._engine.force(job.id, 0, tokens, at=0)

        self._engine.call(both).result()

    def _shared(self, turn: str, mark: str, job: Job, reply: list[int]) -> int:
        """Leading tokens shared with the closest earlier prompt and reply of the agent and mark."""
        ids, agent = job.prompt.ids, turn.partition(" ")[0]
        best = 0
        for other in self._texts[agent, mark]:
            n = min(len(ids), len(other))
            differ = np.flatnonzero(ids[:n] != other[:n])
            best = max(best, int(differ[0]) if len(differ) else n)
        self._texts[agent, mark].append(np.concatenate([ids, np.array(reply)]))
        return best

    def _next_reply(self, text: str) -> tuple[str, str, int, str]:
        script = json.loads(self._script.read_text(encoding="utf-8"))
        turn, needs = script.pop("turn"), script.pop("needs")
        mark = next((mark for mark in script if mark in text and needs in text), "")
        number = self._n_said[turn, mark]
        self._n_said[turn, mark] += 1
        replies = script.get(mark, [ENOUGH])
        return turn, mark, number, replies[min(number, len(replies) - 1)]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--script", type=Path, required=True)
    options.add_argument("--template", type=Path)
    args, flags = options.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    model = write_model(args.folder / "tiny-agent", args.template)
    build = app.build

    def scripted(config: Config, **options: Any) -> app.Server:
        server = build(config, **options)
        engine: Any = Scripted(
            server.engine,
            server.services.tokenizer,
            script=args.script,
            jobs=args.folder / "jobs.jsonl",
        )
        return replace(server, services=replace(server.services, engine=engine))

    app.build = scripted
    make_cli()(["serve", str(model), *flags])


if __name__ == "__main__":
    main()
