"""Sparse prefill: right answers and first tokens, against prompts that are read in full.

    python benchmarks/sparse.py [--draft itself|hybrid] [--tokens 4096,8192,12288] [--sessions 10]
        [--one-message] [--score-once]
    python benchmarks/sparse.py --device-run [--shape 8b] [--tokens 32768] [--keep 0.2] [--rounds 3]
    python benchmarks/sparse.py --scorer-run [--shape 8b] [--chunks 2048,8192] [--cached]

The first asks the built-in recall model for facts that are somewhere in a long message (held out of
its training), read in full and at each share; the model itself or the hybrid scores. --one-message:
facts and question are one message, whose middle is thinned. --score-once: for a slow draft, a
prompt is scored once for all shares, and no times are printed. Nothing is cached. The model is so
small that no draft is smaller: its times show what scoring costs, not what sparse prefill gains.

The second measures only time, on any device: random weights of a large shape, with a small one that
scores, and prompts of random tokens. Times are to the first token, scoring included, and by stage.
The third runs the small model alone, with chunks of several sizes; --cached: it keeps what it
reads.

The first takes about a quarter of an hour on two cores, the others take a minute or two on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from engines import Answer, BenchEngine, model_info, shape_of, widened
from mlx_lm.models.cache import make_prompt_cache
from prefill import prompts
from report import cli, grid, names, numbers, save

from firn import backends
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.core.values import CacheControl, Chat, Message, Namespace, Prompt, TextPart
from firn.demo.facts import Placement, make_session, n_facts_for
from firn.models.load import loader
from firn.models.load.loader import LoadedModel
from firn.models.model_arguments import IdsOnly
from firn.sparse.attention import N_LOOKAHEAD, AttentionScorer, Reading
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scores
from firn.text.prompt.maker import PromptMaker
from models import SHAPES, random_model

GIB = 1 << 30
SHARES = (0.1, 0.2, 0.3, 0.5)
DRAFT_OF = {"8b": "0.6b", "4b": "0.6b", "0.6b": "tiny", "tiny": "tiny"}
MAX_REPLY = 48
FIRST_SEED = 50_000


def folder_of(model: str) -> Path:
    return Path(str(resources.files("firn.demo") / "models" / model))


# --- answers -------------------------------------------------------------------------------


class Exam:
    """Questions about long messages, with the one right answer to each."""

    def __init__(self, n_tokens: int, n_sessions: int, placement: Placement) -> None:
        self.tokenizer = loader.load_tokenizer(folder_of("firn-demo"))
        prompts = PromptMaker(self.tokenizer, context_length=16384)
        self.asked = []
        for seed in range(FIRST_SEED, FIRST_SEED + n_sessions):
            session = make_session(
                seed,
                n_facts=n_facts_for(n_tokens),
                n_questions=2,
                kinds=("fact",),
                placement=placement,
            )
            turn = 0 if placement == "question" else 1
            chat = Chat(
                tuple(
                    Message(m["role"], (TextPart(m["content"]),))  # type: ignore[arg-type]
                    for m in session.messages(turn)
                )
            )
            self.asked.append((prompts.make(chat), session.questions[turn].answer))

    def sit(self, engine: BenchEngine, n: int, keep: float | None) -> tuple[bool, Answer]:
        """Asks the n-th question, its prompt read in full or in part. Returns whether it was
        answered right, and the answer."""
        prompt, expected = self.asked[n]
        answer = engine.ask(
            prompt.ids.tolist(),
            MAX_REPLY,
            read=False,
            write=False,
            sparse=None if keep is None else Sparse(keep, 0),
            essential=prompt.essential,
            eos=self.tokenizer.eos,
        ).wait()
        reply = [t for t in answer.tokens if t not in self.tokenizer.eos]
        return self.tokenizer.decode(reply) == expected, answer


class RememberingScorer(AttentionScorer):
    """Scores a prompt once, for all shares."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: dict[bytes, Scores] = {}

    def read(self, reading: Reading, n_tokens: int, *, alone: bool = False) -> None:
        if reading.prompt.ids.tobytes() not in self._known:
            super().read(reading, n_tokens, alone=alone)

    def finish_slice(self, reading: Reading) -> bool:
        return reading.prompt.ids.tobytes() in self._known or super().finish_slice(reading)

    def scores(self, reading: Reading) -> Scores:
        key = reading.prompt.ids.tobytes()
        if key not in self._known:
            self._known[key] = super().scores(reading)
        return self._known[key]


def answers(
    draft: str,
    lengths: Sequence[int],
    n_sessions: int,
    placement: Placement,
    *,
    once: bool,
    out: Path | None,
) -> None:
    name = {"itself": "firn-demo", "hybrid": "firn-demo-hybrid"}[draft]
    target = loader.load(folder_of("firn-demo"), served_name="firn-demo", form=widened("float32"))
    small = loader.load(folder_of(name), served_name=name, form=widened("float32"))

    def scorer() -> AttentionScorer:
        make = RememberingScorer if once else AttentionScorer
        cache = CacheOff()
        return make(small.model, small.info, make_layers=small.make_layers, cache=cache)

    config = {"model_type": "qwen3"}
    rows, points = [], []
    engine = BenchEngine(
        config, dtype=mx.float32, memory_nbytes=GIB, model=target.model, scorer=scorer
    )
    with engine:
        for n_tokens in lengths:
            exam = Exam(n_tokens, n_sessions, placement)
            if not once:
                exam.sit(engine, 0, SHARES[0])  # warms up
            right = dict.fromkeys((None, *SHARES), 0)
            ratios: dict[float | None, list[float]] = {keep: [] for keep in right}
            for n in range(n_sessions):
                full_s = 0.0
                for keep in right:
                    is_right, answer = exam.sit(engine, n, keep)
                    right[keep] += is_right
                    full_s = full_s or answer.first_s
                    ratios[keep].append(answer.first_s / full_s)
            n_prompt = round(statistics.mean(len(p) for p, _ in exam.asked))
            cells = [f"{n_prompt}", f"{right[None]}/{n_sessions}"]
            for keep in SHARES:
                ratio = statistics.median(ratios[keep])
                ratio_shown = "" if once else f" {ratio:.2f}"
                cells.append(f"{right[keep]}/{n_sessions}{ratio_shown}")
                point = {"tokens": n_prompt, "keep": keep, "ratio": ratio}
                points.append(point | {"right": right[keep], "full": right[None]})
            rows.append(cells)
            print(grid([["tokens", "in full", *map(str, SHARES)], *rows]), flush=True)
    print("right answers" + ("" if once else ", and the first token's time over the full prompt's"))
    if out is not None:
        options = {"draft": draft, "sessions": n_sessions, "placement": placement}
        save(out, "sparse", options=options, result=points)


# --- time ----------------------------------------------------------------------------------

STAGES = ("draft reads", "lookahead", "comparison")


class TimedScorer(AttentionScorer):
    """Times each stage of the newest prompt, from the dispatch of each slice to its end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds: dict[str, float] = {}
        self._began, self._stage = 0.0, ""

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Reading:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        return super().open(prompt, namespace, control)

    def read(self, reading: Reading, n_tokens: int, *, alone: bool = False) -> None:
        n_left = self.n_left(reading)
        self._stage = STAGES[0 if n_left > N_LOOKAHEAD + 1 else 1 if n_left > 1 else 2]
        self._began = time.perf_counter()
        super().read(reading, n_tokens, alone=alone)

    def finish_slice(self, reading: Reading) -> bool:
        is_over = super().finish_slice(reading)
        self.seconds[self._stage] += time.perf_counter() - self._began
        return is_over


def _scorer(config: dict[str, Any], dtype: mx.Dtype, *, cache_nbytes: int = 0) -> TimedScorer:
    model = random_model(config, dtype=dtype, seed=8)
    make_layers = partial(make_prompt_cache, model)
    probe = make_layers()
    logits = model(mx.array([[0]]), cache=probe)
    mx.eval(logits)
    info = model_info(model, config, probe=probe, n_vocab=int(logits.shape[-1]))
    cache: PrefixCache | CacheOff = CacheOff()
    if cache_nbytes:
        settings = CacheSettings(cache_nbytes)
        layout = Layout.of(probe)
        cache = PrefixCache(layout, settings, fingerprint=info.fingerprint, dtype=info.dtype)
    loaded = LoadedModel(model, info, make_layers, probe, IdsOnly())
    shapes = backends.find().buckets(loaded)
    return TimedScorer(model, info, make_layers=make_layers, cache=cache, buckets=shapes)


def _draft_of(shape: str) -> tuple[dict[str, Any], mx.Dtype]:
    config, dtype = shape_of(DRAFT_OF[shape])
    return config | {"vocab_size": SHAPES[shape][0]["vocab_size"]}, dtype


def _in_stages(seconds: dict[str, float], *, first_s: float = 0.0) -> str:
    stages = dict(seconds)
    if first_s:
        stages["target"] = first_s - sum(seconds.values())
    return ", ".join(f"{stage} {took:.3f} s" for stage, took in stages.items())


def device_run(
    shape: str, lengths: Sequence[int], shares: Sequence[float], rounds: int, *, out: Path | None
) -> None:
    config, dtype = shape_of(shape)
    scorers: list[TimedScorer] = []

    def scorer() -> TimedScorer:
        scorers.append(_scorer(*_draft_of(shape)))
        return scorers[-1]

    def ask(engine: BenchEngine, ids: list[int], keep: float | None) -> Answer:
        sparse = None if keep is None else Sparse(keep, 0)
        answer = engine.ask(ids, 1, read=False, write=False, sparse=sparse).wait()
        if keep is not None and not answer.n_skipped:
            raise RuntimeError("nothing was skipped")
        return answer

    rows, points = [], []
    options: dict[str, Any] = {"dtype": dtype, "memory_nbytes": GIB, "by_depth": True}
    with BenchEngine(config, scorer=scorer, **options) as engine:
        for n_tokens in lengths:
            make = prompts(n_tokens, int(config["vocab_size"]))
            times: dict[float | None, list[float]] = {None: [], **{k: [] for k in shares}}
            for i in range(rounds + 2):
                for keep in times:
                    answer = ask(engine, next(make), keep)
                    how = f"keep {keep}" if keep else "in full"
                    stages = ""
                    if keep:
                        stages = f" ({_in_stages(scorers[0].seconds, first_s=answer.first_s)})"
                    # In the first round shapes are planned, in the second chunks still grow.
                    label = "warms up, " if i < 2 else ""
                    print(f"{n_tokens} {label}{how}: {answer.first_s:.3f} s{stages}", flush=True)
                    if i >= 2:
                        times[keep].append(answer.first_s)
            full = times[None]
            ratios = {k: statistics.median(np.array(times[k]) / np.array(full)) for k in shares}
            rows.append(
                [f"{n_tokens}", f"{statistics.median(full):.3f} s"]
                + [f"{statistics.median(times[k]):.3f} s, {ratios[k]:.2f}" for k in shares]
            )
            points += [{"tokens": n_tokens, "keep": k, "ratio": ratios[k]} for k in shares]
    print(grid([["tokens", "in full", *(f"keep {k}" for k in shares)], *rows]))
    if out is not None:
        save(out, "sparse", options={"shape": shape, "rounds": rounds}, result=points)


def scorer_run(
    shape: str, lengths: Sequence[int], chunks: Sequence[int], rounds: int, *, cached: bool
) -> None:
    """The small model alone, by the size of its chunks. cached: it keeps what it has read."""
    config, dtype = _draft_of(shape)
    scorer = _scorer(config, dtype, cache_nbytes=16 * GIB if cached else 0)
    for n_tokens in lengths:
        make = prompts(n_tokens, int(config["vocab_size"]))
        for chunk in chunks:
            for i in range(rounds + 1):
                prompt = Prompt(np.array(next(make), dtype=np.int64))
                began = time.perf_counter()
                reading = scorer.open(prompt, Namespace(""), CacheControl())
                is_over = False
                while not is_over:
                    scorer.read(reading, chunk, alone=True)
                    is_over = scorer.finish_slice(reading)
                scorer.scores(reading)
                took = time.perf_counter() - began
                scorer.close_reading(reading)
                label = "" if i else "warms up, "
                stages = _in_stages(scorer.seconds)
                print(f"{n_tokens} {label}chunks of {chunk}: {took:.3f} s ({stages})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", choices=("itself", "hybrid"), default="itself")
    parser.add_argument("--tokens", type=numbers)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--one-message", action="store_true")
    parser.add_argument("--score-once", action="store_true")
    parser.add_argument("--device-run", action="store_true")
    parser.add_argument("--scorer-run", action="store_true")
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--chunks", type=numbers, default=[2048, 8192])
    parser.add_argument("--shape", choices=DRAFT_OF, default="8b")
    parser.add_argument("--keep", type=names, default=["0.2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device_run:
        shares = [float(k) for k in args.keep]
        device_run(args.shape, args.tokens or [32768], shares, args.rounds, out=args.out)
    elif args.scorer_run:
        lengths = args.tokens or [32768]
        scorer_run(args.shape, lengths, args.chunks, args.rounds, cached=args.cached)
    else:
        lengths = args.tokens or [4096, 8192, 12288]
        placement: Placement = "question" if args.one_message else "message"
        answers(args.draft, lengths, args.sessions, placement, once=args.score_once, out=args.out)


if __name__ == "__main__":
    cli(main)
