"""Write a trained model as a normal model folder.

python -m tools.demo_model.export dense CHECKPOINT_FOLDER src/firn/demo/models/firn-demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
from tools.demo_model.train import HERE, KEEP_FLOAT32, TOKENIZER

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("dense", "hybrid"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((HERE / f"{args.name}.json").read_text())["model"]
    (args.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    greedy = {"do_sample": False, "temperature": 0.0, "eos_token_id": [2, 0], "pad_token_id": 0}
    (args.folder / "generation_config.json").write_text(json.dumps(greedy, indent=2) + "\n")
    params = mx.load(str(args.checkpoint / "params.safetensors"))
    weights = {
        name: value if name.endswith(KEEP_FLOAT32) else value.astype(mx.bfloat16)
        for name, value in params.items()
    }
    mx.save_safetensors(str(args.folder / "model.safetensors"), weights, {"format": "mlx"})
    for name in TOKENIZER_FILES:
        if TOKENIZER.parent != args.folder.absolute():
            shutil.copy(TOKENIZER.parent / name, args.folder / name)


if __name__ == "__main__":
    main()
