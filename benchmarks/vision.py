"""First-token times of chats with pictures: firn against mlx-vlm's server with its prefix cache on.

    python benchmarks/vision.py [--peer-python LAB/mlx/bin/python] [--rounds 3] [--family qwen2_5_vl]

Both serve one random vision model, made on the spot (float32, a few MB); pictures have 256 tokens each.
Every round asks for pictures that no server has seen.

    new picture    first token of a first question about a picture
    second         first token of the next question in that chat: picture and reply are known
    into a chat    first token when a picture arrives after a chat of about 2,000 cached tokens
    eight          seconds until eight requests with a picture each, sent together, have 64 tokens
                   each

The servers run one after the other in each round, so that neither has to share the machine.

Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import BenchError, Column, cli, save, table
from servers import Server, environment, free_port, lab

from firn.bench.client import Target, words
from models import COMMON, SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer

SIDE = 448
PATCH, MERGE = 14, 2
N_CHAT_WORDS, N_REPLY = 400, 16
N_AT_ONCE, N_LONG_REPLY = 8, 64
MARKUP = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}MARKUP{% else %}{{ part.text or '' }}
{%- endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("MARKUP", MARKUP)
COLUMNS = (
    Column("new_s", "new picture s", 3),
    Column("second_s", "second s", 3),
    Column("into_s", "into a chat s", 3),
    Column("eight_s", "eight s", 2),
    Column("eight_tokens", "tokens of eight", 0, ""),
    Column("second_cached", "cached, second", 0, ""),
    Column("into_cached", "cached, chat", 0, ""),
)
# A fifth of the language model's size, as in Qwen2.5-VL-3B.
VISION_CONFIG: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 160,
    "intermediate_size": 320,
    "out_hidden_size": 256,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 1024,
}
HYBRID: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [6, 5, 5],
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}


def config_of(family: str) -> dict[str, Any]:
    """The four control tokens follow the vocabulary that the tokenizer is trained to."""
    text = COMMON | {"vocab_size": VOCAB_SIZE + 8, "model_type": family}
    ids = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    shared = {
        "model_type": family,
        "eos_token_id": text["eos_token_id"],
        "vision_config": VISION_CONFIG | {"model_type": family},
        **{name: VOCAB_SIZE + i for i, name in enumerate(ids)},
    }
    if family == "qwen3_5":
        return shared | {"text_config": text | HYBRID, "vocab_size": text["vocab_size"]}
    rope = {"type": "mrope", "mrope_section": [16, 8, 8]}
    return text | {"rope_scaling": rope} | shared


def write_model(folder: Path, family: str) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm import utils

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    for i, name in enumerate(names):
        tokenizer["added_tokens"].append(
            {"id": VOCAB_SIZE + i, "content": name, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
        )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    pixels = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    config = config_of(family)
    module, _ = utils.get_model_and_args(config)
    settings = {"text_config": {}, **json.loads(json.dumps(config))}
    args = module.ModelConfig.from_dict(settings)
    args = utils.update_module_configs(args, module, settings, ["text", "vision"])
    mx.random.seed(7)
    model = module.Model(args)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    assert SPECIAL_TOKENS[2] == "<|im_end|>"


def picture(seed: object) -> dict[str, Any]:
    """A content part with a PNG of noise, which does not compress."""
    rng = random.Random(str(seed))
    rows = b"".join(b"\0" + rng.randbytes(3 * SIDE) for _ in range(SIDE))

    def chunk(kind: bytes, body: bytes) -> bytes:
        end = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + end

    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    png += chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(*content: Any) -> Any:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"role": "user", "content": parts}


def measure(server: Server, number: int) -> dict[str, float]:
    """One round."""
    seed = f"{server.name} {number}"
    chat: list[Any] = [ask(picture(seed), f"{words(4, seed=seed)} What is it?")]
    first = server.chat(chat, N_REPLY)
    chat += [{"role": "assistant", "content": first.text}, ask("And what colour has it?")]
    second = server.chat(chat, N_REPLY)
    talk: list[Any] = [ask(words(N_CHAT_WORDS, seed=(seed, "talk")))]
    told = server.chat(talk, N_REPLY)
    talk += [{"role": "assistant", "content": told.text}]
    into = server.chat([*talk, ask(picture((seed, 2)), "What is this?")], N_REPLY)
    requests = [[ask(picture((seed, i, "of eight")), f"Number {i}?")] for i in range(N_AT_ONCE)]
    began = time.perf_counter()
    with ThreadPoolExecutor(N_AT_ONCE) as threads:
        replies = list(threads.map(lambda r: server.chat(r, N_LONG_REPLY), requests))
    return {
        "new_s": first.first_s,
        "second_s": second.first_s,
        "into_s": into.first_s,
        "eight_s": time.perf_counter() - began,
        "eight_tokens": sum(r.n_completion for r in replies),
        "second_cached": second.n_cached,
        "into_cached": into.n_cached,
    }


def start(name: str, python: Path, model: Path) -> Server:
    run, port = lab() / "run" / f"vision-{name}", free_port()
    shutil.rmtree(run, ignore_errors=True)
    (run / "ssd").mkdir(parents=True)
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "firn":
        command = ["-m", "firn", "serve", str(model), *address, "--ssd-cache-dir", str(run / "ssd")]
        env = environment(HOME=str(run))
    else:
        command = ["-m", "mlx_vlm.server", "--model", str(model), *address]
        env = environment(HOME=str(run), APC_ENABLED="1", APC_NUM_BLOCKS="8192")
    log = run / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(python), *command], stdout=out, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,
        )  # fmt: skip
    target = Target(f"http://127.0.0.1:{port}", str(model), name)
    server = Server(name, process, port, target, 0.0, ())
    try:
        server.target = replace(target, model=server._wait(model, log))
    except BaseException:
        server.stop()
        raise
    return server


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--peer-python",
        type=Path,
        default=lab() / "mlx" / "bin" / "python",
        help="of an environment that has mlx-vlm (default: the lab's)",
    )
    options.add_argument("--firn-python", type=Path, default=Path(sys.executable))
    options.add_argument("--family", default="qwen2_5_vl", choices=["qwen2_5_vl", "qwen3_5"])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--save", type=Path, help="a JSON file for all rounds")
    args = options.parse_args()
    model = lab() / "models" / f"vision-{args.family}"
    if not (model / "config.json").exists():
        try:
            write_model(model, args.family)
        except ImportError as e:
            raise BenchError(f"{e}; run this with a Python that has mlx-vlm") from e
    pythons = {"firn": args.firn_python}
    if args.peer_python.exists():
        pythons["mlx-vlm"] = args.peer_python
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for number in range(args.rounds):
        for name, python in pythons.items():
            with start(name, python, model) as server:
                server.chat([ask(picture((name, number, "warm up")), "Hello?")], 4)
                rounds[name].append(measure(server, number))
    print(table(f"vision, {args.family}, {SIDE} x {SIDE} pixels", COLUMNS, rounds=rounds))
    if args.save:
        save(args.save, "vision", options=vars(args), result=rounds)


if __name__ == "__main__":
    cli(main)
