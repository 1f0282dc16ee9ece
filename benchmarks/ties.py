"""How often drafts change a greedy reply: steps of other shapes round differently, and flip ties.

    .venv/bin/python benchmarks/ties.py [--models firn-demo,firn-demo-hybrid,smollm2]
        [--replies 20] [--tokens 120]

Each reply is made twice by one engine: with one token per step, and with drafts of eight tokens
that are right nine times in ten (they are the first reply's), in every step, whether that pays or
not. A reply counts up to its first different token: after it the two are different texts.

Takes about five minutes on two cores, most of them SmolLM2's.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from engines import BenchEngine, MakeLayers, widened
from report import cli, grid, names, save
from speculation import ASKS
from speculation_device import Oracle

from firn.assembly import model_names
from firn.core.values import Chat, Message, Role, TextPart
from firn.demo.facts import make_session
from firn.models.decode.batch import Group
from firn.models.load import loader
from firn.models.load.hub import HubRules
from firn.models.speculation.drafters import Draft
from firn.models.speculation.gate import Unlimited
from firn.models.speculation.speculator import DraftPlan, Speculation
from firn.text.prompt.maker import PromptMaker

N_GUESSES, RIGHT = 8, 0.9


class Known(Oracle):
    """Guesses N_GUESSES tokens at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.right = RIGHT

    def odds(self, kind: int) -> float:
        return RIGHT

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        return super().draft(rows, N_GUESSES)


class Always(Speculation):
    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        return DraftPlan(1 + N_GUESSES)


def prompts(name: str, folder: Path, n: int) -> list[list[int]]:
    tokenizer = loader.load_tokenizer(folder)
    maker = PromptMaker(tokenizer, context_length=16384)
    roles: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
    token_lists = []
    for i in range(n):
        if name.startswith("firn-demo"):
            session = make_session(
                i, n_facts=12, n_questions=6, kinds=("fact",), placement="system"
            )
            turns = [(m["role"], m["content"]) for m in session.messages(i % 6)]
        else:
            turns = [("user", list(ASKS.values())[i % len(ASKS)](i))]
        chat = Chat(tuple(Message(roles[role], (TextPart(text),)) for role, text in turns))
        token_lists.append(maker.make(chat).ids.tolist())
    return token_lists


def measure(name: str, *, n_replies: int, n_tokens: int) -> list[str]:
    folder = model_names.resolve(name, HubRules(offline=True))
    config = dict(loader.read_config(folder))
    loaded = loader.load(folder, served_name=name, form=widened("auto"))
    known = Known()

    def speculation(model: Any, make_layers: MakeLayers) -> Speculation:
        return Always(known, allowance=Unlimited)

    build = partial(
        BenchEngine, config, dtype=mx.float32, memory_nbytes=1 << 28, model=loaded.model
    )
    with build(speculation=speculation) as engine:
        asks = prompts(name, folder, n_replies)
        ask = partial(engine.ask, read=False, write=False)
        n_compared = n_changed = 0
        for ids in asks:
            plain = ask(ids, n_tokens, speculates=False).wait().tokens
            known.replies[tuple(ids)] = plain
            guessed = ask(ids, n_tokens).wait().tokens
            pairs = enumerate(zip(plain, guessed, strict=True))
            first = next((i for i, (a, b) in pairs if a != b), None)
            n_changed += first is not None
            n_compared += len(plain) if first is None else first + 1
        totals = engine.engine.parts.runner.speculator.totals  # type: ignore[attr-defined]
    share = totals.n_accepted / max(totals.n_drafted, 1)
    return [name, str(n_replies), str(n_compared), str(n_changed), f"{share:.2f}"]


def run(args: argparse.Namespace) -> None:
    rows = [["model", "replies", "tokens compared", "changed", "guesses right"]]
    for name in names(args.models):
        rows.append(measure(name, n_replies=args.replies, n_tokens=args.tokens))
        print(" ".join(rows[-1]), flush=True)
    print(grid(rows))
    if args.out:
        save(args.out, "ties", options=vars(args), result=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="firn-demo,firn-demo-hybrid,smollm2")
    parser.add_argument("--replies", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--out", type=Path)
    run(parser.parse_args())


if __name__ == "__main__":
    cli(main)
