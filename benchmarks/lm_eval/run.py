"""lm-evaluation-harness against firn's completions API, on a task that the built-in model can do.

    python -m venv lm-eval && lm-eval/bin/pip install 'lm_eval[api]' transformers
    .venv/bin/python benchmarks/lm_eval/run.py --lm-eval lm-eval/bin/lm_eval

Writes two tasks, starts `firn serve` on the built-in model, and runs the harness's
`local-completions` on both: `facts` (which of four answers is the likeliest after a document and a
question: echo, logprobs of the prompt, one token) and `document` (the perplexity of whole
documents). The first must be almost all right, because the answers are in the document; a wrong
position or a wrong cache would show immediately.

Takes about a minute, once the harness is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from firn.demo.builtin import builtin_folder
from firn.demo.facts import make_session

MODEL = "firn-demo"
FACTS = """task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/facts.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
DOCUMENT = """task: document
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/document.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
metadata: {{version: 1.0}}
"""


def write_tasks(folder: Path, n: int) -> None:
    dice = random.Random(7)
    facts, documents = [], []
    for seed in range(n):
        session = make_session(seed, n_facts=20, n_questions=4, kinds=["fact"], placement="system")
        rights = [question.answer for question in session.questions]
        documents.append({"text": session.document})
        for i, right in enumerate(rights):
            chat = "".join(
                f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in session.messages(i)
            )
            value = right.rpartition(" is ")[2]
            others = [r.rpartition(" is ")[2] for r in rights if r != right]
            choices = [right, *(right.replace(value, other) for other in others)]
            dice.shuffle(choices)
            facts.append(
                {
                    "prompt": f"{chat}<|im_start|>assistant\n",
                    "choices": choices,
                    "answer": choices.index(right),
                }
            )
    for name, rows in (("facts", facts), ("document", documents)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "facts.yaml").write_text(FACTS.format(folder=folder), encoding="utf-8")
    (folder / "document.yaml").write_text(DOCUMENT.format(folder=folder), encoding="utf-8")


@contextmanager
def serving() -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "firn", "serve", MODEL, "--port", str(port), "--no-ssd-cache"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/ready").close()
            except OSError:
                time.sleep(0.1)
            else:
                break
        yield url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--lm-eval", default="lm_eval", help="the harness's command")
    options.add_argument(
        "--sessions", type=int, default=8, help="documents with four questions each"
    )
    args = options.parse_args()
    tokenizer = builtin_folder(MODEL)
    with tempfile.TemporaryDirectory() as name, serving() as url:
        write_tasks(Path(name), args.sessions)
        model = [
            f"model={MODEL}",
            f"base_url={url}/v1/completions",
            f"tokenizer={tokenizer}",
            "tokenized_requests=True",
            "num_concurrent=4",
            "max_length=4096",
        ]
        command = [args.lm_eval, "--model", "local-completions", "--model_args", ",".join(model)]
        command += ["--tasks", "facts,document", "--include_path", name, "--batch_size", "4"]
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
