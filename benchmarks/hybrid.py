"""Hybrid models (gated delta layers beside attention) off a Mac, where mlx-lm has no kernel for them.

    PYTHONPATH=src python benchmarks/hybrid.py                      # on a GPU: layer, prompts, first
    .venv/bin/python benchmarks/hybrid.py --parts servers           # on a CPU, beside mlx-lm's server

    layer     one layer's rule at Qwen3.5's shape: mlx-lm's loop, in chunks, by a kernel where there is
              one; how far each is from float64; on CUDA with matrix products in TF32 and in float32
    prompts   many prompts that arrive together: the built-in hybrid model's shape and the dense one's
    first     a cold prompt's first token: Qwen3.5-9B's shape against a dense model of about its size
    servers   firn and mlx-lm's server: a cold prompt, later turns of the chat, decoding
    families  a chunk of a prompt and a token with other recurrent layers, by mlx-lm's code and by
              firn's; on a CPU 256 tokens and processor time
    states    cutting a hybrid model's state out of a row, filling a row from it, a decode step; on a CPU
              processor time
    convolutions  short ones, by MLX and tap by tap

Weights are random. Everything that a ratio compares is measured in one run, in turns. On a GPU, a part
takes at most three minutes; on two cores `layer` takes one, and `servers` a few for each model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import BenchError, Column, cli, grid, names, save, table
from servers import Server, lab, model_folder

from firn.bench.client import Message, words
from models import (
    COMMON,
    CONFIGS,
    HYBRID_06B,
    QWEN3_06B,
    QWEN3_8B,
    QWEN35_9B,
    random_model,
    write_model,
)

PARTS = ("layer", "prompts", "first", "servers", "families", "states", "convolutions")
TF32 = "MLX_ENABLE_TF32"
GIB = 1 << 30
HEADS, WIDTH = (16, 32), 128
"""Key heads, value heads; of each. Qwen3.5-9B's."""
N_EXACT = 192
"""Tokens that are compared with float64."""
FIRST_SHAPES = {
    "9b": (QWEN35_9B, QWEN3_8B),
    "0.6b": (HYBRID_06B, QWEN3_06B),
    "tiny": (CONFIGS["hybrid"], CONFIGS["dense"]),
}
SERVED = {"hybrid": CONFIGS["hybrid"], "hybrid-0.6b": HYBRID_06B}

SMALL: dict[str, Any] = COMMON | {
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 96,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 48,
}
JAMBA = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_experts": 1,
    "num_experts_per_tok": 1,
}
GRIFFIN = {
    "attention_bias": False,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "attention"],
}
RWKV7 = {
    "head_dim": 64,
    "norm_eps": 1e-5,
    "a_low_rank_dim": 64,
    "v_low_rank_dim": 32,
    "gate_low_rank_dim": 128,
    "decay_low_rank_dim": 64,
}
LFM2 = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 768,
    "block_ff_dim": 1536,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [1],
}
LING = {
    "max_position_embeddings": 16_384,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "use_qk_norm": True,
}
LATENT = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "partial_rotary_factor": 0.5,
}
MAMBA2 = CONFIGS["ssm"] | SMALL | {"num_heads": 24, "head_dim": 64, "state_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": SMALL | {"model_type": "mamba", "state_size": 16},
    "jamba": SMALL | {"model_type": "jamba"} | JAMBA,
    "mamba2": MAMBA2 | {"model_type": "mamba2"},
    "recurrent_gemma": SMALL | {"model_type": "recurrent_gemma"} | GRIFFIN,
    "rwkv7": SMALL | {"model_type": "rwkv7"} | RWKV7,
    "lfm2": SMALL | {"model_type": "lfm2"} | LFM2,
    "bailing_moe_linear": SMALL | {"model_type": "bailing_moe_linear"} | LING,
    "bailing_hybrid": SMALL | {"model_type": "bailing_hybrid"} | LING | LATENT,
}
WIDE = {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32}
WIDE |= {"num_key_value_heads": 32, "head_dim": 128, "time_step_rank": 256}
OF_WIDE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 128},
    "rwkv7": {"head_dim": 64},
    "lfm2": {"block_dim": 4096, "block_ff_dim": 8192},
}
"""On a GPU: layers of models of about 7 billion weights."""

Times = dict[str, list[float]]


def say(text: str) -> None:
    print(text, flush=True)


# --- a layer -------------------------------------------------------------------------------


def layer(args: argparse.Namespace) -> dict[str, Any]:
    """On CUDA in two processes: MLX reads once how it multiplies."""
    import mlx.core as mx

    is_cuda = mx.default_device() != mx.Device(mx.cpu) and not mx.metal.is_available()
    if not is_cuda or args.alone:
        return {"here": _layer(args, is_cuda=is_cuda)}
    results = {}
    for what, value in (("TF32", "1"), ("float32", "0")):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = [sys.executable, __file__, "--parts", "layer", "--alone", "--json", str(out)]
            command += ["--tokens", str(args.tokens), "--rounds", str(args.rounds)]
            say(f"-- matrix products in {what}")
            subprocess.run(command, env={**os.environ, TF32: value}, check=True, timeout=300)
            results[what] = json.loads(out.read_text())["result"]["layer"]["here"]
    return results


def _arguments(n_tokens: int, n_rows: int) -> list[Any]:
    rng, shape = np.random.default_rng(n_tokens), (n_rows, n_tokens)
    q, k = (rng.standard_normal((*shape, HEADS[0], WIDTH)) for _ in range(2))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    v = rng.standard_normal((*shape, HEADS[1], WIDTH))
    g = np.exp(-rng.exponential(0.05, (*shape, HEADS[1])))
    beta = rng.random((*shape, HEADS[1]))
    state = rng.standard_normal((n_rows, HEADS[1], WIDTH, WIDTH))
    return [a.astype(np.float32) for a in (q, k, v, g, beta, state)]


def _in_float64(given: list[Any]) -> Any:
    q, k, v, g, beta, state = (a.astype(np.float64) for a in given)
    q, k = (np.repeat(a, HEADS[1] // HEADS[0], axis=2) for a in (q, k))
    y = np.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        u = (v[:, t] - (state @ k[:, t, :, :, None])[..., 0]) * beta[:, t, :, None]
        state = state + u[..., None] * k[:, t, :, None]
        y[:, t] = (state @ q[:, t, :, :, None])[..., 0]
    return y


def _layer(args: argparse.Namespace, *, is_cuda: bool) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.models.gated_delta import gated_delta_ops

    from firn import backends
    from firn.backends.contract import BackendOptions
    from firn.backends.cpu import DELTA
    from firn.config import default_cache_dir

    backends.find().install(BackendOptions(cache_folder=default_cache_dir()))
    forms: dict[str, Callable[..., Any]] = {"loop": gated_delta_ops, "chunks": DELTA}
    if is_cuda:
        from firn.backends.cuda.device import CHUNKED_DELTA
        from firn.backends.cuda.recurrence import KernelBuild, Rule, delta_by_kernel, fault
        from firn.backends.recurrence.forms import Chunked, ChunkedDelta

        forms["plain chunks"] = ChunkedDelta(Chunked(64), channel_chunk=16)
        forms["chunks"] = CHUNKED_DELTA
        why = fault(KernelBuild(Rule.DELTA, WIDTH, WIDTH, False))
        say(f"the kernel: {why or 'works'}")
        if why is None:
            forms["kernel"] = delta_by_kernel
    rows = [["tokens", "rows", *(f"{name} ms" for name in forms), *_over(forms)]]
    result: dict[str, Any] = {"ms": {}, "error": {}}
    for n_tokens, n_rows in ((1, 1), (1, 8), (8, 1), (64, 1), (512, 1), (args.tokens, 1)):
        given = [mx.array(a) for a in _arguments(n_tokens, n_rows)]
        if is_cuda:
            given[:3] = [a.astype(mx.bfloat16) for a in given[:3]]
        ms = {name: 1000 * _seconds(form, given, args.rounds) for name, form in forms.items()}
        result["ms"][f"{n_tokens}x{n_rows}"] = ms
        cells = [f"{ms[name]:.2f}" for name in forms]
        over = [f"{ms['loop'] / ms[name]:.1f}" for name in forms if name != "loop"]
        rows.append([str(n_tokens), str(n_rows), *cells, *over])
        say(" ".join(rows[-1]))
    say(grid(rows))
    exact = _arguments(N_EXACT, 1)
    want = _in_float64(exact)
    for name, form in forms.items():
        y = np.array(form(*(mx.array(a) for a in exact))[0], dtype=np.float64)
        far = float(np.linalg.norm(y - want) / np.linalg.norm(want))
        result["error"][name] = far
        say(f"{name}: {far:.1e} from float64 after {N_EXACT} tokens")
    return result


def _over(forms: dict[str, Any]) -> list[str]:
    return [f"loop / {name}" for name in forms if name != "loop"]


def _seconds(form: Callable[..., Any], given: list[Any], n_rounds: int) -> float:
    import mlx.core as mx

    mx.eval(given)
    mx.eval(form(*given))
    taken = []
    for _ in range(max(n_rounds, 1)):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(form(*given))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# --- a hybrid model and a dense one, in one engine each ---------------------------------------


def _engine(config: dict[str, Any], dtype: str) -> Any:
    import mlx.core as mx
    from engines import BenchEngine

    return BenchEngine(config, dtype=getattr(mx, dtype), memory_nbytes=8 * GIB, by_depth=True)


def _prompt(config: dict[str, Any], n: int, rng: Any) -> list[int]:
    return [1, 2, 3, *rng.integers(4, int(config["vocab_size"]), n - 3).tolist()]


def prompts(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the last of the first tokens."""
    from firn.demo.builtin import builtin_folder

    each, taken = args.total_tokens // args.prompts, {}
    for name in ("firn-demo", "firn-demo-hybrid"):
        folder = builtin_folder(name)
        assert folder is not None
        config = json.loads((folder / "config.json").read_text("utf-8"))
        rng, times = np.random.default_rng(3), []
        with _engine(config, str(config["torch_dtype"])) as engine:
            for i in range(args.rounds + 1):
                texts = [_prompt(config, each, rng) for _ in range(args.prompts)]
                began = time.perf_counter()
                answers = [engine.ask(ids, 1) for ids in texts]
                last = max(a.wait().times[0] for a in answers)
                say(f"{name}: {last - began:.2f} s" + ("" if i else " (warming up)"))
                times += [last - began] * (i > 0)
        taken[name] = times
    _compare(taken, f"{args.prompts} prompts of {each:,} tokens, all first tokens")
    return taken


def first(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to a cold prompt's first token, and tokens a second behind it."""
    taken, speeds = {}, {}
    for name, config in zip(("hybrid", "dense"), FIRST_SHAPES[args.shape], strict=True):
        rng, times, speed = np.random.default_rng(4), [], []
        with _engine(config, args.dtype) as engine:
            n_weights = sum(w.size for w in _arrays(engine.weights))
            say(f"{name}: {n_weights / 1e9:.2f} billion weights")
            for i in range(args.rounds + 1):
                answer = engine.ask(_prompt(config, args.cold_tokens, rng), 48).wait()
                speed.append(47 / (answer.times[-1] - answer.times[0]))
                say(f"{name}: {answer.first_s:.3f} s, {speed[-1]:.0f} tok/s")
                times += [answer.first_s] * (i > 0)
        taken[name], speeds[name] = times, speed[1:]
        _free()
    taken = dict(reversed(taken.items()))
    _compare(taken, f"{args.shape}: a cold prompt of {args.cold_tokens:,} tokens, first token")
    dense, hybrid = (statistics.median(speeds[name]) for name in ("dense", "hybrid"))
    say(f"decoding behind it: hybrid {hybrid / dense:.2f} of dense")
    return {"first_s": taken, "decode_tok_s": speeds}


def _arrays(model: Any) -> list[Any]:
    from mlx.utils import tree_flatten

    return [w for _, w in tree_flatten(model.parameters())]


def _free() -> None:
    import gc

    import mlx.core as mx

    gc.collect()
    mx.clear_cache()


def _compare(taken: Times, title: str) -> None:
    dense, hybrid = (statistics.median(times) for times in taken.values())
    say(f"{title}: dense {dense:.2f} s, hybrid {hybrid:.2f} s, hybrid / dense {hybrid / dense:.2f}")


# --- servers -------------------------------------------------------------------------------


def servers(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for model in args.models:
        folder = _folder(model)
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in args.servers}
        with contextlib.ExitStack() as running:
            started = {
                name: running.enter_context(
                    Server.start(name, folder, memory_mb=1024, preload=not args.as_installed)
                )
                for name in args.servers
            }
            n_words = 0
            for server in started.values():
                warm = server.chat([_said("user", words(40, seed="warm up"))], 4)
                n_words = n_words or max(args.chat_tokens * 40 // max(warm.n_prompt, 1), 1)
            for turn in range(args.rounds):
                for name, server in started.items():
                    rounds[name].append(_chat(server, n_words, args, turn=turn))
                    say(f"{model}, round {turn + 1} of {args.rounds}, {name}: {rounds[name][-1]}")
        columns = [
            Column("cold_s", "cold first token s", 3),
            Column("later_s", "later turns s", 3),
            Column("decode_tok_s", "decode tok/s", 1, "more"),
        ]
        say("\n" + table(f"{model}, medians of {args.rounds}", columns, rounds=rounds) + "\n")
        results[model] = rounds
    return results


def _folder(name: str) -> Path:
    if name in SERVED and not (lab() / "models" / name / "config.json").exists():
        say(f"making {name}")
        write_model(lab() / "models" / name, SERVED[name], seed=7)
    return model_folder(name)


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _chat(server: Server, n_words: int, args: argparse.Namespace, *, turn: int) -> dict[str, float]:
    """A chat that the server has never seen."""
    messages, replies = [_said("user", words(n_words, seed=(turn, "cold")))], []
    for i in range(1 + args.turns):
        reply = server.chat(messages, args.reply, ignore_eos=True)
        replies.append(reply)
        messages.append(_said("assistant", reply.text))
        messages.append(_said("user", words(20, seed=(turn, i))))
    decoding_s = sum(r.total_s - r.first_s for r in replies)
    return {
        "cold_s": replies[0].first_s,
        "later_s": statistics.median(r.first_s for r in replies[1:]),
        "decode_tok_s": sum(r.n_completion - 1 for r in replies) / max(decoding_s, 1e-9),
    }


# --- other families, and states ---------------------------------------------------------------


def families(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a chunk and of a token, before and after firn's forms are installed."""
    import mlx.core as mx

    from firn import backends
    from firn.backends.contract import BackendOptions
    from firn.backends.cpu import CpuBackend
    from firn.config import default_cache_dir

    backend: Any = backends.find()
    is_cpu = isinstance(backend, CpuBackend)
    n_tokens, dtype = (256, mx.float32) if is_cpu else (args.tokens, mx.bfloat16)
    results: dict[str, dict[str, float]] = {}
    for name, config in FAMILIES.items():
        if name not in args.families and args.families:
            continue
        if not is_cpu:
            config = config | WIDE | OF_WIDE.get(name, {})
        backend.uninstall()
        options = BackendOptions(exact=True, cache_folder=default_cache_dir())
        backend.install(options)  # its products alone
        if isinstance(backend, CpuBackend) and backend.blas.library is not None:
            backend.blas.library.set_threads(1)
        model, result = random_model(config, dtype=dtype), {}
        for how in ("mlx-lm", "firn"):
            if how == "firn":
                backend.recurrences.install(exact=False)
            for what, n in (("chunk", n_tokens), ("token", 1)):
                result[f"{what} {how}"] = 1000 * _pass_seconds(model, n, args.rounds, is_cpu=is_cpu)
        results[name] = result
        say(f"{name}: " + ", ".join(f"{what} {ms:.2f} ms" for what, ms in result.items()))
        del model
        _free()
    return results


def _pass_seconds(model: Any, n_tokens: int, n_rounds: int, *, is_cpu: bool) -> float:
    """Of n_tokens after a few others; the least of several tries. On a CPU processor time."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    taken, clock = [], time.process_time if is_cpu else time.perf_counter
    for _ in range(n_rounds + 1):
        layers = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=layers), [c.state for c in layers])
        began = clock()
        mx.eval(model(mx.array([[7] * n_tokens]), cache=layers)[:, -1], [c.state for c in layers])
        taken.append(clock() - began)
    return min(taken)


def states(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to cut a state, to fill a row from it, and of a decode step."""
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache, make_prompt_cache

    from firn.backends import find
    from firn.backends.contract import BackendOptions
    from firn.cache.arrays.payload import evaluate
    from firn.cache.arrays.transfers import use
    from firn.cache.layout import Layout
    from firn.cache.parts import Part
    from firn.config import default_cache_dir
    from firn.core.ports import At

    backend, results = find(), {}
    backend.install(BackendOptions(cache_folder=default_cache_dir()))
    is_cpu = mx.default_device() == mx.Device(mx.cpu)
    clock = time.process_time if is_cpu else time.perf_counter
    use(backend.transfers)
    for name, config in SERVED.items():
        model: Any = random_model(config, dtype=mx.float32 if is_cpu else mx.bfloat16)
        layers, empty = make_prompt_cache(model), make_prompt_cache(model)
        mx.eval(model(mx.array([[7] * 40]), cache=layers), [c.state for c in layers])
        layout, at = Layout.of(layers), At(0, 40)
        payload = layout.cut(Part.STATE, layers, at, 0, 40)
        nbytes = sum(c.nbytes for c in layers if isinstance(c, ArraysCache))
        ms: dict[str, float] = {}
        for _ in range(10):
            for what in ("cut", "fill", "step"):
                mx.synchronize()
                began = clock()
                if what == "cut":
                    evaluate([layout.cut(Part.STATE, layers, at, 0, 40)])
                elif what == "fill":
                    layout.fill(Part.STATE, empty, [payload], 40)
                    mx.eval([c.state for c in empty if isinstance(c, ArraysCache)])
                else:
                    mx.eval(model(mx.array([[7]]), cache=make_prompt_cache(model)))
                took = 1000 * (clock() - began)
                ms[what] = min(ms.get(what, took), took)
        say(
            f"{name}: {nbytes / 1e6:.1f} MB, " + ", ".join(f"{k} {v:.2f} ms" for k, v in ms.items())
        )
        results[name] = ms | {"nbytes": nbytes}
    return results


def convolutions(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one of four taps and 8,192 channels: MLX's own, and a product for each tap."""
    import mlx.core as mx
    from mlx import nn

    from firn.backends.recurrence.convolution import taps

    n_channels, results = 8192, {}
    layer = nn.Conv1d(n_channels, n_channels, 4, groups=n_channels, bias=False)
    layer.set_dtype(mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32)
    forms: dict[str, Callable[[Any], Any]] = {"MLX": layer, "taps": lambda x: taps(x, layer.weight)}
    for n_tokens in (1, 64, args.tokens):
        x = mx.random.normal((1, n_tokens + 3, n_channels)).astype(layer.weight.dtype)
        ms = {name: 1000 * _seconds(form, [x], 10 * args.rounds) for name, form in forms.items()}
        results[str(n_tokens)] = ms
        say(f"{n_tokens} tokens: " + ", ".join(f"{name} {t:.3f} ms" for name, t in ms.items()))
    return results


# -------------------------------------------------------------------------------------------

DO = {
    "layer": layer,
    "prompts": prompts,
    "first": first,
    "servers": servers,
    "families": families,
    "states": states,
    "convolutions": convolutions,
}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--parts", type=names, default=list(PARTS[:3]), metavar="A,B,..")
    options.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    options.add_argument("--tokens", type=int, default=4096, help="layer: of the longest call")
    options.add_argument("--families", type=names, default=[], metavar="A,B,..", help="these alone")
    options.add_argument("--prompts", type=int, default=24)
    options.add_argument("--total-tokens", type=int, default=46_000, help="prompts: of all")
    options.add_argument("--shape", choices=FIRST_SHAPES, default="9b")
    options.add_argument("--dtype", default="bfloat16", help="first: of the weights")
    options.add_argument("--cold-tokens", type=int, default=16_384, help="first: of the prompt")
    options.add_argument("--servers", type=names, default=["firn", "mlx-lm"], metavar="A,B,..")
    options.add_argument("--models", type=names, default=list(SERVED), metavar="A,B,..")
    options.add_argument("--chat-tokens", type=int, default=1000, help="servers: of the prompt")
    options.add_argument("--turns", type=int, default=3, help="servers: later ones")
    options.add_argument("--reply", type=int, default=48, help="servers: tokens of a reply")
    options.add_argument(
        "--as-installed", action="store_true", help="servers: OpenBLAS is not preloaded"
    )
    options.add_argument("--json", type=Path, help="JSON file (default: hybrid.json in the lab)")
    options.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.rounds < 1 or args.turns < 1 or not set(args.parts) <= set(PARTS):
        raise BenchError(f"at least one round and turn, and parts of {', '.join(PARTS)}, please")
    result = {}
    for part in args.parts:
        say(f"== {part}")
        began = time.perf_counter()
        result[part] = DO[part](args)
        say(f"== {part} took {time.perf_counter() - began:.0f} s")
        save(args.json or lab() / "hybrid.json", "hybrid", options=vars(args), result=result)


if __name__ == "__main__":
    cli(main)
