"""How long a step of several tokens takes on this device: by width, by rows, and for new shapes.

    PYTHONPATH=src python benchmarks/widths.py [--shape 4b] [--rows 1,8] [--widths 2,5,9,17]
        [--steps 24] [--only plain,traced,alone,padded,new] [--tokens 512] [--parts]
        [--mlx-products]

    plain     one token per row; the next step is dispatched while the device computes. `alone`
              waits for each step
    traced    the same steps, traced once for a shape instead of built each time, as on CUDA
    padded    several tokens; columns in blocks of 512 and a mask, as in steps with drafts on CUDA.
              `bias`: the mask holds numbers. `wide traced`: the same steps, traced. `wide ahead`:
              each is read after the next one is dispatched
    new       several tokens, all accepted: attention sees another number of columns at each step
    again     the same lengths once more

host: time until the step is dispatched. all: time until its tokens are read. Medians in ms, then
the longest step and the first.

Takes a minute or two on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from engines import shape_of
from mlx_lm.models.cache import KVCache, make_prompt_cache
from report import cli, grid, names, numbers

from firn import backends
from firn.backends.contract import BackendOptions
from firn.backends.cuda.traced import PLAIN, TracedSteps
from firn.config import default_cache_dir
from firn.models.decode.padding import in_blocks
from firn.models.decode.ragged import ALL_COLUMNS, Columns
from firn.models.decode.rewind import RaggedStep, ready
from models import random_model

BLOCK, CHUNK = 512, 2048
Times = list[tuple[float, float]]
"""Seconds of each step until it is dispatched, and until its tokens are read."""


class Bench:
    def __init__(self, model: Any, *, n_rows: int, n_steps: int, n_tokens: int) -> None:
        self.model, self.n_rows, self.n_steps = model, n_rows, n_steps
        self.n_tokens = n_tokens
        self.vocab = model.args.vocab_size
        self.traced = TracedSteps(model, n_built=0)

    def caches(self, columns: Columns | None = None) -> list[Any]:
        """Caches with a prompt in them. columns: as in a group that drafts."""
        rows: list[list[Any]] = []
        for i in range(self.n_rows):
            layers = make_prompt_cache(self.model)
            prompt = mx.arange(self.n_tokens - i) * (7 + i) % self.vocab
            for start in range(0, prompt.size, CHUNK):
                self.model(prompt[None, start : start + CHUNK], cache=layers)
                mx.eval([c.state for c in layers])
            rows.append(layers)
        if self.n_rows == 1:
            return rows[0]
        layers = [KVCache.merge(list(same)) for same in zip(*rows, strict=True)]
        return ready(layers, columns) if columns else layers

    def plain(self, what: str) -> Times:
        """The times of steps of one token per row."""
        layers, tokens, times = self.caches(), mx.zeros((self.n_rows,), dtype=mx.int32), []
        before, heard = tokens, time.perf_counter()
        for _ in range(2 * self.n_steps):
            began = time.perf_counter()
            logits = self._logits(tokens[:, None], layers, PLAIN if what == "traced" else None)
            tokens = mx.argmax(logits[:, -1], axis=-1)
            mx.async_eval(tokens)
            host = time.perf_counter() - began
            (tokens if what == "alone" else before).tolist()
            before = tokens
            times.append((host, time.perf_counter() - heard))
            heard = time.perf_counter()
        return times[self.n_steps :]

    def wide(
        self,
        width: int,
        layers: list[Any],
        columns: Columns = ALL_COLUMNS,
        *,
        traced: bool = False,
        ahead: bool = False,
    ) -> Times:
        """ahead: the tokens of a step are read once the next one is dispatched."""
        times = []
        ids = [list(range(1, width + 1))] * self.n_rows
        before, heard = mx.array(0), time.perf_counter()
        for _ in range(self.n_steps):
            began = time.perf_counter()
            step = RaggedStep(layers, [width] * self.n_rows, width)
            seen = layers if traced else in_blocks(layers, columns)
            logits = self._logits(mx.array(ids), seen, columns if traced else None)
            tokens = mx.argmax(logits, axis=-1)
            mx.async_eval(tokens)
            host = time.perf_counter() - began
            (before if ahead else tokens).tolist()
            before = tokens
            step.keep([width] * self.n_rows)
            times.append((host, time.perf_counter() - heard))
            heard = time.perf_counter()
        return times

    def steps(self, widths: list[int], wanted: list[str]) -> Iterator[tuple[int, str, Times]]:
        """The width, name and times of each kind that is wanted."""
        for what in ("plain", "traced", "alone"):
            if what in wanted:
                yield 1, what, self.plain(what)
        for width in widths:
            if "padded" in wanted:
                for what, columns in (("padded", Columns(BLOCK)), ("bias", Columns(BLOCK, True))):
                    yield width, what, self.wide(width, self.caches(columns), columns)
            if "traced" in wanted:
                columns = Columns(BLOCK)
                for what, ahead in (("wide traced", False), ("wide ahead", True)):
                    layers = self.caches(columns)
                    yield width, what, self.wide(width, layers, columns, traced=True, ahead=ahead)
            if self.n_rows > 1 or "new" not in wanted:
                continue
            layers = self.caches()
            yield width, "new", self.wide(width, layers)
            for layer in layers:
                layer.trim(width * self.n_steps)
            yield width, "again", self.wide(width, layers)

    def _logits(self, ids: mx.array, layers: list[Any], columns: Columns | None) -> mx.array:
        """columns: of a step that is traced."""
        logits = self.traced.wide(ids, layers, columns) if columns else None
        if logits is None:
            logits = self.model(ids, cache=layers)
        return logits


def parts(config: dict[str, Any], dtype: mx.Dtype, *, widths: list[int], n_steps: int) -> None:
    """Prints the times of all layers' products and attention by themselves, with one row."""
    n, size, wide = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    heads, kv, d = (
        config[f"{k}"] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes = [(heads * d, size), (kv * d, size), (kv * d, size), (size, heads * d)]
    shapes += [(wide, size), (wide, size), (size, wide)]
    weights = [[mx.random.normal(x, dtype=dtype) for x in shapes] for _ in range(n)]
    keys = [mx.random.normal((1, kv, 1024, d), dtype=dtype) for _ in range(n)]
    mx.eval(weights, keys)

    def products(width: int) -> list[mx.array]:
        x = {k: mx.random.normal((1, width, k), dtype=dtype) for k in {size, wide, heads * d}}
        return [x[w.shape[1]] @ w.T for layer in weights for w in layer]

    def attention(width: int, how: str) -> list[mx.array]:
        q = mx.random.normal((1, heads, width, d), dtype=dtype)
        mask: Any = None
        if how == "causal":
            mask = "causal"
        elif how != "open":
            mask = mx.arange(1024)[None] <= mx.arange(900, 900 + width)[:, None]
        if how == "additive":
            mask = mx.where(mask, 0.0, -mx.inf).astype(dtype)
        if how != "by hand":
            return [
                mx.fast.scaled_dot_product_attention(q, k, k, scale=0.1, mask=mask) for k in keys
            ]
        q = q.reshape(1, kv, heads // kv * width, d)
        seen = mx.where(mask, 0.0, -mx.inf).astype(dtype)
        seen = mx.concatenate([seen] * (heads // kv))
        return [mx.softmax(0.1 * q @ k.swapaxes(-1, -2) + seen, axis=-1) @ k for k in keys]

    def timed(what: str, make: Callable[[], list[mx.array]]) -> None:
        host, whole = [], []
        for _ in range(n_steps):
            began = time.perf_counter()
            out = make()
            mx.async_eval(out)
            host.append(time.perf_counter() - began)
            mx.eval(out)
            whole.append(time.perf_counter() - began)
        ms = [1000 * statistics.median(x) for x in (host, whole)]
        print(f"{what}: host {ms[0]:.1f} all {ms[1]:.1f}", flush=True)

    for width in [1, *widths]:
        timed(f"{width} products", partial(products, width))
        for how in ("open", "causal", "mask", "additive", "by hand"):
            timed(f"{width} attention {how}", partial(attention, width, how))


def run(args: argparse.Namespace) -> None:
    config, dtype = shape_of(args.shape)
    if args.parts:
        parts(config, dtype, widths=numbers(args.widths), n_steps=args.steps)
        return
    if not args.mlx_products:
        backends.find().install(BackendOptions(cache_folder=default_cache_dir()))
    model = random_model(config, dtype=dtype)
    rows = [["tokens", "rows", "width", "", "host", "all", "longest", "first"]]
    for n_tokens in numbers(args.tokens):
        for n_rows in numbers(args.rows):
            bench = Bench(model, n_rows=n_rows, n_steps=args.steps, n_tokens=n_tokens)
            for width, what, steps in bench.steps(numbers(args.widths), names(args.only)):
                hosts, alls = zip(*steps, strict=True)
                times = [statistics.median(hosts), statistics.median(alls), max(alls), alls[0]]
                cells = [str(n_tokens), str(n_rows), str(width), what]
                rows.append([*cells, *(f"{1000 * seconds:.1f}" for seconds in times)])
                print(" ".join(rows[-1]), flush=True)
    print(grid(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--widths", default="2,5,9,17,32")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", default="512", help="of each row's prompt")
    parser.add_argument(
        "--only", default="plain,traced,alone,padded,new", help="new: and the same again"
    )
    parser.add_argument("--mlx-products", action="store_true", help="not by firn's kernel")
    parser.add_argument("--parts", action="store_true", help="products and attention by themselves")
    run(parser.parse_args())


if __name__ == "__main__":
    cli(main)
