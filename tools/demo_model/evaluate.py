"""Exact answers of a model folder on held-out sessions, by context length and kind of question.

    python -m tools.demo_model.evaluate FOLDER --lengths 256 1024 4096 12288 --sessions 10
    python -m tools.demo_model.evaluate FOLDER --tools --sessions 20

Plain mlx-lm: the chat template, the model's own cache, greedy decoding, the whole reply compared
with the whole right answer. Earlier turns of the dialogue carry the right answers, so every
question is judged by itself. Results go into results.json next to this file, one entry per model.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tools.demo_model.batches import held_out_session, held_out_tools
from tools.demo_model.dialogues import written_calls

from firn.demo.facts import ACKNOWLEDGED, KINDS

RESULTS = Path(__file__).with_name("results.json")
FIRST_SEED = 9000  # not among the seeds that training looked at
CHUNK = 512
MAX_REPLY_TOKENS = 80


@dataclass(slots=True)
class Score:
    """Counts of one context length."""

    n_prompt_tokens: int = 0
    n_sessions: int = 0
    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, reply: str, answer: str) -> None:
        self.asked[kind] += 1
        self.right[kind] += reply == answer
        if reply != answer:
            print(f"  {kind}: {reply!r}, not {answer!r}", flush=True)

    def report(self) -> dict[str, Any]:
        kinds = [k for k in (*KINDS, "call", "reply") if self.asked[k]]
        counted = [k for k in kinds if k not in ACKNOWLEDGED]
        n = sum(self.asked[k] for k in counted)
        return {
            "exact": round(sum(self.right[k] for k in counted) / n, 4),
            "questions": n,
            "sessions": self.n_sessions,
            "mean_prompt_tokens": round(self.n_prompt_tokens / self.n_sessions),
            "by_kind": {k: f"{self.right[k]}/{self.asked[k]}" for k in kinds},
        }


@dataclass(slots=True)
class Dialogue:
    """A growing chat with its cache. What it has read is never read again."""

    model: Any
    tokenizer: Any
    cache: list[Any]
    fed: list[int] = field(default_factory=list)

    def reply(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The greedy reply to `messages`, which must continue those of the last call."""
        prompt = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True
        )
        assert prompt[: len(self.fed)] == self.fed
        for start in range(len(self.fed), len(prompt) - 1, CHUNK):
            chunk = prompt[start : min(start + CHUNK, len(prompt) - 1)]
            self.model(mx.array([chunk]), cache=self.cache)
            mx.eval([c.state for c in self.cache])
        self.fed = prompt[:-1]
        branch = copy.deepcopy(self.cache)  # the reply must not stay in the next prompt's prefix
        reply: list[int] = []
        for token, _ in generate_step(
            mx.array(prompt[-1:]), self.model, prompt_cache=branch, max_tokens=MAX_REPLY_TOKENS
        ):
            if token in self.tokenizer.eos_token_ids:
                break
            reply.append(int(token))
        return str(self.tokenizer.decode(reply))


def score(model: Any, tokenizer: Any, n_tokens: int, *, n_sessions: int, n_questions: int) -> Score:
    result = Score()
    for seed in range(FIRST_SEED, FIRST_SEED + n_sessions):
        session = held_out_session(n_tokens, n_questions=n_questions, seed=seed)
        dialogue = Dialogue(model, tokenizer, make_prompt_cache(model))
        for n, question in enumerate(session.questions):
            reply = dialogue.reply(session.messages(n))
            if n == 0:
                result.n_sessions += 1
                result.n_prompt_tokens += len(dialogue.fed) + 1
            result.count(question.kind, reply, question.answer)
    return result


def score_tools(model: Any, tokenizer: Any, *, n_sessions: int) -> Score:
    """Tool calls ("call") must be the right call, byte for byte; "reply" is everything else."""
    result = Score()
    for seed in range(FIRST_SEED, FIRST_SEED + n_sessions):
        chat = held_out_tools(seed)
        dialogue = Dialogue(model, tokenizer, make_prompt_cache(model))
        for n, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            kind = "call" if message.get("tool_calls") else "reply"
            reply = dialogue.reply(chat.messages[:n], chat.tools)
            result.count(kind, reply, message["content"] + written_calls(message))
        result.n_sessions += 1
        result.n_prompt_tokens += len(dialogue.fed) + 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--questions", type=int, default=20)
    args = parser.parse_args()
    model, tokenizer = load(str(args.folder))
    for length in args.lengths:
        scores = score(
            model, tokenizer, length, n_sessions=args.sessions, n_questions=args.questions
        )
        record(args.folder.name, str(length), scores)
    if args.tools:
        record(args.folder.name, "tools", score_tools(model, tokenizer, n_sessions=args.sessions))


def record(model: str, row: str, scores: Score) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = results.get(model, {}) | {row: scores.report()}
    results[model] = dict(sorted(rows.items(), key=lambda r: (not r[0].isdigit(), len(r[0]), r[0])))
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(model, row, scores.report(), flush=True)


if __name__ == "__main__":
    main()
