"""Train one of the built-in models.

    python -m tools.demo_model.train dense --budget 700 --out FOLDER [--resume FOLDER]

The schedule runs on the clock, not on a step count: the learning rate warms up, stays, and falls
linearly to zero in the last part of the budget. Lengths grow with skill: a longer one joins as
soon as the longest in play is answered well, and at a fixed share of the budget at the latest. No
length is ever dropped. Weights are float32; the forward and backward passes run in bfloat16, the
precision the model ships in.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3, qwen3_next
from tokenizers import Tokenizer
from tools.demo_model import gated_delta
from tools.demo_model.batches import (
    LENGTHS,
    Feeder,
    HeldOutRow,
    held_out_row,
    held_out_tool_row,
    stack,
)

from firn.demo.facts import ACKNOWLEDGED

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "src/firn/demo/models/firn-demo/tokenizer.json"
EVAL_EVERY_S = 60.0
SAVE_EVERY_S = 60.0
LOG_EVERY_S = 10.0
CACHE_LIMIT = 24 << 30  # two runs share a GPU
WATCHED = (256, 1024, 4096, 12288)
REPORTED = (256, 512, 1024, 2048, 4096, 8192, 12288, 15360)
KEEP_FLOAT32 = ("A_log",)

Params = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The "train" part of a configuration."""

    seed: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    decay_from: float  # share of the budget after which the learning rate falls
    tokens_per_batch: int
    other_weight: float  # loss weight of tokens that are not answers
    first_level: int  # index into LENGTHS
    last_level: int
    level_up_loss: float
    level_by: tuple[float, ...]  # share of the budget at which a level is in play at the latest


def build(config: dict[str, Any]) -> nn.Module:
    arch = {"qwen3": qwen3, "qwen3_next": qwen3_next}[config["model_type"]]
    model = arch.Model(arch.ModelArgs.from_dict(config))
    model.update(tree_unflatten(list(_initial(model).items())))
    for layer in model.layers:
        if "linear_attn" in layer:
            layer.linear_attn.conv1d.__class__ = ShiftConv
    return model


def _initial(model: nn.Module) -> Params:
    """Small normal weights; residual outputs smaller; decays from a few tokens to thousands."""
    n_layers = len(model.layers)
    params: Params = {}
    for name, value in tree_flatten(model.parameters()):
        if name.endswith("A_log"):
            value = mx.log(mx.random.uniform(1.0, 8.0, value.shape))
        elif name.endswith("dt_bias"):
            step = mx.exp(mx.random.uniform(np.log(1e-3), np.log(0.3), value.shape))
            value = step + mx.log(-mx.expm1(-step))  # softplus(value) == step
        elif name.endswith("conv1d.weight"):
            value = mx.random.uniform(-0.5, 0.5, value.shape)
        elif value.ndim == 2:
            scale = 0.02 if "embed" in name else value.shape[1] ** -0.5 / 2
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                scale /= (2 * n_layers) ** 0.5
            value = scale * mx.random.normal(value.shape)
        params[name] = value.astype(mx.float32)
    return params


class ShiftConv(nn.Conv1d):
    """A depthwise causal convolution as shifted products, whose gradient every backend supports."""

    def __call__(self, x: mx.array) -> mx.array:
        kernel = self.weight[..., 0]  # (channels, taps)
        n = x.shape[1] - kernel.shape[1] + 1
        taps = range(kernel.shape[1])
        wide, kernel = x.astype(mx.float32), kernel.astype(mx.float32)
        return sum(wide[:, i : i + n] * kernel[:, i] for i in taps).astype(x.dtype)


def logits_of(model: nn.Module, params: Params, tokens: mx.array) -> mx.array:
    """Logits under `params` in the precision of inference."""
    cast = {k: v if k.endswith(KEEP_FLOAT32) else v.astype(mx.bfloat16) for k, v in params.items()}
    model.update(tree_unflatten(list(cast.items())))
    return model(tokens)


@dataclass(slots=True)
class Trainer:
    """Owns weights, moments and clock of one run."""

    model: nn.Module
    recipe: Recipe
    params: Params
    first: Params
    second: Params
    n_steps: int = 0
    elapsed_s: float = 0.0
    level: int = 0

    @classmethod
    def fresh(cls, model: nn.Module, recipe: Recipe) -> Trainer:
        params = dict(tree_flatten(model.parameters()))
        zeros = {k: mx.zeros_like(v) for k, v in params.items()}
        return cls(model, recipe, params, zeros, dict(zeros), level=recipe.first_level)

    def save(self, folder: Path) -> None:
        """Writes two files, each small enough to transfer, under a temporary name first."""
        moments = {f"first.{k}": v.astype(mx.bfloat16) for k, v in self.first.items()}
        moments |= {f"second.{k}": v.astype(mx.bfloat16) for k, v in self.second.items()}
        clock = {"n_steps": self.n_steps, "elapsed_s": self.elapsed_s, "level": self.level}
        meta = {k: str(v) for k, v in clock.items()}
        for name, arrays in (("params", self.params), ("moments", moments)):
            mx.save_safetensors(str(folder / f"{name}.new.safetensors"), arrays, meta)
            os.replace(folder / f"{name}.new.safetensors", folder / f"{name}.safetensors")

    def load(self, folder: Path) -> None:
        self.params, meta = mx.load(str(folder / "params.safetensors"), return_metadata=True)
        moments = mx.load(str(folder / "moments.safetensors"))
        for name in self.params:
            self.first[name] = moments[f"first.{name}"].astype(mx.float32)
            self.second[name] = moments[f"second.{name}"].astype(mx.float32)
        self.n_steps, self.level = int(meta["n_steps"]), int(meta["level"])
        self.elapsed_s = float(meta["elapsed_s"])

    def learning_rate(self, progress: float) -> float:
        recipe = self.recipe
        warm = min(1.0, (self.n_steps + 1) / recipe.warmup_steps)
        fall = min(1.0, max(0.0, 1 - progress) / (1 - recipe.decay_from))
        return recipe.learning_rate * warm * max(fall, 0.005)


Step = Callable[..., tuple[Params, Params, Params, mx.array, mx.array]]


def make_step(model: nn.Module, recipe: Recipe) -> Step:
    """One AdamW step, compiled: (weights, moments, batch, rate, step) -> the same, and losses."""

    def loss(params: Params, tokens: mx.array, is_answer: mx.array) -> tuple[mx.array, mx.array]:
        logits = logits_of(model, params, tokens[:, :-1]).astype(mx.float32)
        each = nn.losses.cross_entropy(logits, tokens[:, 1:])
        weights = mx.maximum(is_answer, recipe.other_weight)
        answers = (each * is_answer).sum() / is_answer.sum()
        return (each * weights).sum() / weights.sum(), mx.stop_gradient(answers)

    def decays(name: str, value: mx.array) -> bool:
        return value.ndim == 2 and "embed" not in name

    def step(
        params: Params,
        first: Params,
        second: Params,
        tokens: mx.array,
        is_answer: mx.array,
        rate: mx.array,
        count: mx.array,
    ) -> tuple[Params, Params, Params, mx.array, mx.array]:
        (_, answers), grads = mx.value_and_grad(loss)(params, tokens, is_answer)
        norm = mx.sqrt(sum(g.square().sum() for g in grads.values()))
        clip = mx.minimum(1.0, 1.0 / (norm + 1e-6))
        b1, b2 = 0.9, 0.98
        for name, grad in grads.items():
            grad = grad * clip
            first[name] = b1 * first[name] + (1 - b1) * grad
            second[name] = b2 * second[name] + (1 - b2) * grad.square()
            m = first[name] / (1 - b1**count)
            v = second[name] / (1 - b2**count)
            decay = recipe.weight_decay if decays(name, grad) else 0.0
            change = m / (mx.sqrt(v) + 1e-8) + decay * params[name]
            params[name] = params[name] - rate * change
        return params, first, second, answers, norm

    return mx.compile(step)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out dialogues of one length; an answer is right if every token of it is the argmax.

    That is what greedy decoding would reply, given the right answers before.
    """

    label: str
    rows: tuple[HeldOutRow, ...]

    def accuracy(self, model: nn.Module, params: Params) -> dict[str, Any]:
        """Accuracy over all questions that need the context, and kinds with errors by name."""
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for held_out in self.rows:
            n = -(-(len(held_out.row.tokens) - 1) // 128) * 128
            batch = stack([held_out.row], n)
            guess = mx.argmax(logits_of(model, params, mx.array(batch.tokens[:, :-1])), axis=-1)
            hits = np.array(guess)[0] == batch.tokens[0, 1:]
            edges = np.flatnonzero(np.diff(batch.is_answer[0], prepend=0, append=0))
            for kind, (start, end) in zip(held_out.kinds, edges.reshape(-1, 2), strict=True):
                total[kind] += 1
                right[kind] += bool(hits[start:end].all())
        asked = [kind for kind in total if kind not in (*ACKNOWLEDGED, "read")]
        share = sum(right[k] for k in asked) / sum(total[k] for k in asked)
        missed = {k: f"{right[k]}/{total[k]}" for k in total if right[k] < total[k]}
        return {"all": round(share, 4), **missed}


def held_out(lengths: Sequence[int], *, n_rows: int, seed: int) -> list[HeldOut]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    seeds = range(seed, seed + n_rows)
    sets = []
    for length in lengths:
        rows = (held_out_row(tokenizer, length, n_questions=24, seed=s) for s in seeds)
        sets.append(HeldOut(str(length), tuple(rows)))
    tools = tuple(held_out_tool_row(tokenizer, seed=s) for s in seeds)
    return [*sets, HeldOut("tools", tools)]


def train(
    trainer: Trainer, feeder: Feeder, sets: Sequence[HeldOut], *, budget_s: float, out: Path
) -> None:
    recipe, step = trainer.recipe, make_step(trainer.model, trainer.recipe)
    losses = dict.fromkeys(LENGTHS, 3.0)
    counts = dict.fromkeys(LENGTHS, 0)
    began = time.perf_counter() - trainer.elapsed_s
    next_log = next_eval = next_save = trainer.elapsed_s + LOG_EVERY_S
    n_tokens, waited_s = 0, 0.0
    last: tuple[int, mx.array] | None = None
    log = (out / "log.jsonl").open("a")

    def note(**fields: Any) -> None:
        line = json.dumps({"s": round(trainer.elapsed_s), "step": trainer.n_steps, **fields})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    while trainer.elapsed_s < budget_s:
        progress = trainer.elapsed_s / budget_s
        by_now = sum(progress >= share for share in recipe.level_by) - 1
        if losses[LENGTHS[trainer.level]] < recipe.level_up_loss:
            by_now = max(by_now, trainer.level + 1)
        if by_now > trainer.level and trainer.level < recipe.last_level:
            trainer.level = min(by_now, recipe.last_level)
            note(event="length joins", length=LENGTHS[trainer.level])
        feeder.set_level(trainer.level)

        asked = time.perf_counter()
        batch = feeder.get()
        waited_s += time.perf_counter() - asked
        rate = trainer.learning_rate(progress)
        trainer.n_steps += 1
        trainer.params, trainer.first, trainer.second, answers, norm = step(
            trainer.params,
            trainer.first,
            trainer.second,
            mx.array(batch.tokens),
            mx.array(batch.is_answer),
            mx.array(rate),
            mx.array(float(trainer.n_steps)),
        )
        mx.async_eval(trainer.params, trainer.first, trainer.second, answers)
        if last is None:  # the first step compiled kernels, which is not training time
            answers.item()
            began = time.perf_counter() - trainer.elapsed_s
        if last is not None:  # read one step late: the GPU works while Python goes on
            length, value = last[0], last[1].item()
            counts[length] += 1
            keep = min(0.95, counts[length] / (counts[length] + 4))
            losses[length] = keep * losses[length] + (1 - keep) * value
        last = (batch.is_answer.shape[1], answers)
        n_tokens += batch.is_answer.size
        trainer.elapsed_s = time.perf_counter() - began

        if trainer.elapsed_s >= next_log:
            next_log += LOG_EVERY_S
            seen = {str(k): round(losses[k], 4) for k in LENGTHS if counts[k]}
            note(
                loss=seen,
                rate=round(rate, 6),
                norm=round(norm.item(), 3),
                million_tokens=round(n_tokens / 1e6, 1),
                waited_s=round(waited_s, 1),
            )
        if trainer.elapsed_s >= next_eval or trainer.elapsed_s >= budget_s:
            next_eval = trainer.elapsed_s + EVAL_EVERY_S
            note(held_out=_accuracies(trainer, sets))
            trainer.elapsed_s = time.perf_counter() - began
        if trainer.elapsed_s >= next_save:
            next_save = trainer.elapsed_s + SAVE_EVERY_S
            trainer.save(out)
    trainer.save(out)
    lengths = [n for n in REPORTED if n <= LENGTHS[recipe.last_level]]
    note(final=_accuracies(trainer, held_out(lengths, n_rows=20, seed=5000)))


def _accuracies(trainer: Trainer, sets: Sequence[HeldOut]) -> dict[str, Any]:
    return {s.label: s.accuracy(trainer.model, trainer.params) for s in sets}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("dense", "hybrid"))
    parser.add_argument("--budget", type=float, required=True, help="seconds in all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    args = parser.parse_args()
    config = json.loads((HERE / f"{args.name}.json").read_text())
    for setting in args.set:
        key, _, value = setting.partition("=")
        part = "train" if key in config["train"] else "model"
        config[part][key] = json.loads(value)
    recipe = Recipe(**config["train"])
    args.out.mkdir(parents=True, exist_ok=True)
    mx.random.seed(recipe.seed)
    mx.set_cache_limit(CACHE_LIMIT)
    gated_delta.use_for_training()
    trainer = Trainer.fresh(build(config["model"]), recipe)
    if args.resume:
        trainer.load(args.resume)
    seed = recipe.seed + 1000 * trainer.n_steps
    feeder = Feeder(
        TOKENIZER, seed=seed, n_workers=args.workers, tokens_per_batch=recipe.tokens_per_batch
    )
    lengths = [n for n in WATCHED if n <= LENGTHS[recipe.last_level]]
    sets = held_out(lengths, n_rows=8, seed=1000)
    try:
        train(trainer, feeder, sets, budget_s=args.budget, out=args.out)
    finally:
        feeder.close()


if __name__ == "__main__":
    main()
