"""Models in other programs' formats: recognised, so that the error can say what to do instead."""

from __future__ import annotations

from pathlib import Path

GGUF_MAGIC = b"GGUF"
WHAT_TO_DO = (
    "firn serves MLX models: look for it at mlx-community on the Hugging Face hub, or convert the "
    "original with `mlx_lm.convert --hf-path OWNER/NAME -q`"
)


def foreign_format(path: Path) -> str | None:
    """One sentence about a file or folder that holds another program's model; None if it does not."""
    if path.is_file():
        return (
            f"{path} is a GGUF file, llama.cpp's format; {WHAT_TO_DO}." if _is_gguf(path) else None
        )
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    gguf = sorted(path.glob("*.gguf"))
    if gguf:
        return f"{path} holds {gguf[0].name}, a model in llama.cpp's format; {WHAT_TO_DO}."
    torch = sorted([*path.glob("pytorch_model*.bin"), *path.glob("*.pth")])
    if torch:
        return f"{path} holds {torch[0].name}, weights for PyTorch; {WHAT_TO_DO}."
    return None


def _is_gguf(path: Path) -> bool:
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False
