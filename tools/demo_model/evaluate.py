"""Exact answers of a model folder on held-out sessions, by context length and kind of question.

    python -m tools.demo_model.evaluate FOLDER --lengths 256 1024 4096 12288 --sessions 10

Plain mlx-lm: the chat template, the model's own cache, greedy decoding, the whole reply compared
with the whole right answer. Earlier turns of the dialogue carry the right answers, so every
question is judged by itself. Results go into results.json beside this file, one entry a model.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tools.demo_model.batches import held_out_session

from firn.demo.facts import ACKNOWLEDGED, KINDS, Session

RESULTS = Path(__file__).with_name("results.json")
FIRST_SEED = 5000
CHUNK = 512
MAX_REPLY_TOKENS = 64


@dataclass(slots=True)
class Score:
    """Counts of one context length."""

    n_prompt_tokens: int = 0
    n_sessions: int = 0
    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        kinds = [k for k in KINDS if self.asked[k]]
        counted = [k for k in kinds if k not in ACKNOWLEDGED]
        n = sum(self.asked[k] for k in counted)
        return {
            "exact": round(sum(self.right[k] for k in counted) / n, 4),
            "questions": n,
            "sessions": self.n_sessions,
            "mean_prompt_tokens": round(self.n_prompt_tokens / self.n_sessions),
            "by_kind": {k: f"{self.right[k]}/{self.asked[k]}" for k in kinds},
        }


def replies(model: Any, tokenizer: Any, session: Session) -> Iterator[tuple[int, str]]:
    """(tokens in the prompt, reply) for every question of the session."""
    cache = make_prompt_cache(model)
    fed: list[int] = []
    for n in range(len(session.questions)):
        prompt = tokenizer.apply_chat_template(session.messages(n), add_generation_prompt=True)
        assert prompt[: len(fed)] == fed
        for start in range(len(fed), len(prompt) - 1, CHUNK):
            chunk = prompt[start : min(start + CHUNK, len(prompt) - 1)]
            model(mx.array([chunk]), cache=cache)
            mx.eval([c.state for c in cache])
        fed = prompt[:-1]
        branch = copy.deepcopy(cache)  # the reply must not stay in the next question's prefix
        reply: list[int] = []
        steps = generate_step(
            mx.array(prompt[-1:]), model, prompt_cache=branch, max_tokens=MAX_REPLY_TOKENS
        )
        for token, _ in steps:
            if token in tokenizer.eos_token_ids:
                break
            reply.append(int(token))
        yield len(prompt), tokenizer.decode(reply)


def score(model: Any, tokenizer: Any, n_tokens: int, *, n_sessions: int, n_questions: int) -> Score:
    result = Score()
    for seed in range(FIRST_SEED, FIRST_SEED + n_sessions):
        session = held_out_session(n_tokens, n_questions=n_questions, seed=seed)
        result.n_sessions += 1
        answered = zip(session.questions, replies(model, tokenizer, session), strict=True)
        for i, (question, (n_prompt, reply)) in enumerate(answered):
            if i == 0:
                result.n_prompt_tokens += n_prompt
            result.asked[question.kind] += 1
            if reply == question.answer:
                result.right[question.kind] += 1
            else:
                print(f"  {n_prompt} {question.text!r}: {reply!r}, not {question.answer!r}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 12288])
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--questions", type=int, default=20)
    args = parser.parse_args()
    model, tokenizer = load(str(args.folder))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    curve = results.setdefault(args.folder.name, {})
    for length in args.lengths:
        began = time.perf_counter()
        found = score(
            model, tokenizer, length, n_sessions=args.sessions, n_questions=args.questions
        )
        curve[str(length)] = found.report() | {"device": str(mx.default_device().type)}
        print(length, curve[str(length)], f"{time.perf_counter() - began:.0f} s", flush=True)
        ordered = dict(sorted(curve.items(), key=lambda item: int(item[0])))
        results[args.folder.name] = ordered
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
