"""The floor: mlx-lm in this process, with no server, and no cache except what is kept by hand.

    python benchmarks/bare.py MODEL < requests     run by throughput.py and chats.py

Requests and answers are lines of JSON; a request names its `kind`. "throughput": tokens per second
of one prompt after another. "long": the first token of a long prompt. "chats": the workload of
chats.py with everything a perfect cache could know already in place, so that only new tokens are
computed: those after the point where a prompt departs from what was computed before it (the text of
a random reply makes other tokens than the model picked), or, if it departs and the model is
recurrent, those after the last question.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

CHUNK = 2048


def throughput(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    prompts = [_ids(tokenizer, m) for m in request["prompts"]]
    start = time.perf_counter()
    n_done = sum(_generate(model, ids, request["n_tokens"]) for ids in prompts)
    return {"tok_s_1": n_done / (time.perf_counter() - start)}


def long(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    ids = _ids(tokenizer, request["prompt"])
    start = time.perf_counter()
    _generate(model, ids, 1)
    return {"long_first_s": time.perf_counter() - start}


def _generate(model: Any, ids: list[int], n_tokens: int) -> int:
    return sum(1 for _ in generate_step(mx.array(ids), model, max_tokens=n_tokens))


def chats(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """First-token seconds: cold, of first turns after a known system prompt, of later turns."""
    system, sessions, n_reply = request["system"], request["sessions"], request["n_reply"]
    first_turns = [_ids(tokenizer, [system, turns[0]]) for turns in sessions]
    n_shared = _n_common(first_turns[0], first_turns[-1]) if len(first_turns) > 1 else 0
    shared = make_prompt_cache(model)
    _first(model, shared, first_turns[0][: max(n_shared, 1)])  # also warms up
    cold_s, _ = _first(model, make_prompt_cache(model), first_turns[0])
    first_s: list[float] = []
    later_s: list[float] = []
    recurrent = any(hasattr(layer, "cache") for layer in shared)
    for turns, ids in zip(sessions, first_turns, strict=True):
        messages = [system, turns[0]]
        cache = copy.deepcopy(shared) if n_shared else make_prompt_cache(model)
        seconds, token = _first(model, cache, ids[n_shared:])
        if n_shared:
            first_s.append(seconds)
        for turn in turns[1:]:
            asked = len(_ids(tokenizer, messages, reply=False))
            tokens = _reply(model, cache, token=token, n=n_reply)
            messages += [{"role": "assistant", "content": tokenizer.decode(tokens)}, turn]
            known, ids = [*ids, *tokens[:-1]], _ids(tokenizer, messages)
            n_known = _n_common(known, ids)
            if recurrent and n_known < len(known):
                n_known = asked
            # Neither the values of the tokens nor their positions affect the time they take.
            seconds, token = _first(model, cache, ids[n_known:])
            later_s.append(seconds)
    return {"cold_s": cold_s, "first_s": first_s, "later_s": later_s}


def _first(model: Any, cache: list[Any], ids: list[int]) -> tuple[float, int]:
    """Consumes the tokens. Returns the seconds until the next one is known, and that token."""
    start = time.perf_counter()
    for i in range(0, len(ids) - 1, CHUNK):
        model(mx.array(ids[i : min(i + CHUNK, len(ids) - 1)])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    logits = model(mx.array([ids[-1:]]), cache=cache)[0, -1]
    token: Any = mx.argmax(logits).item()
    return time.perf_counter() - start, int(token)


def _reply(model: Any, cache: list[Any], *, token: int, n: int) -> list[int]:
    """A greedy reply that begins with `token`; its last token is not consumed yet."""
    tokens = [token]
    while len(tokens) < n:
        tokens.append(_first(model, cache, tokens[-1:])[1])
    return tokens


def _ids(tokenizer: Any, messages: list[Any], *, reply: bool = True) -> list[int]:
    """The messages as tokens, with or without the header of a reply."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=reply, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _n_common(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


KINDS = {"throughput": throughput, "long": long, "chats": chats}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: bare.py MODEL < requests")
    model, tokenizer = load(sys.argv[1])[:2]
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(KINDS[request["kind"]](model, tokenizer, request)), flush=True)


if __name__ == "__main__":
    main()
