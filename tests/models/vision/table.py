"""The table of vision families in docs/vision.md: one row for each tiny model.

python -m tests.models.vision.table      writes it
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.models.vision import gallery
from tests.sweep.checks import MODES, check
from tests.zoo.probe import layout
from tests.zoo.vision import MORE_VISION, VISION
from tests.zoo.vision_parts import VOCAB_SIZE

PATH = Path(__file__).parents[3] / "docs" / "vision.md"
HEAD = """# Vision models

The families of mlx-vlm, built tiny with random weights. The same engine, batch and prefix cache serve
them and text models. For each family this holds (`make sweep` checks it, and
`python -m tests.models.vision.table` writes this file):

- requests with 0, 1, 2 and 3 pictures, in one batch, give what mlx-vlm gives for each alone;
- text and pictures are reused: in exact mode warm logits are bit for bit the cold ones, with pictures
  before and after the resume point; in full mode tokens are the same, away from ties;
- a changed, transposed, mirrored, moved, swapped or half transparent picture is another picture.

After eviction from memory, or a restart, records come back from the SSD bit for bit
(`tests/models/vision/test_disk.py`).

firn takes PNG, JPEG, WebP, GIF, BMP and TIFF. The model sees what a viewer would show: turned
upright, transparency over white, 16 bits scaled to 8. Animations, files with several pages, damaged
files and anything over the limits (`--max-image-mb`, `--max-image-megapixels`, 256 pictures in a
prompt) are a 400 that names the part. With `--allow-image-urls` the server fetches https addresses:
all addresses of a name must be public, the server connects to one of them, redirects are checked in
the same way, and bytes and seconds are limited. File paths are never read.

A family that is not listed works if its model follows mlx-vlm's common contract. firn checks that at
load: one small picture goes through mlx-vlm's own call and through firn's, in chunks, and a model
whose answers differ is refused with one line (`--text-only` serves its text part). Also refused:
families whose model changes the number of tokens (llava_next is one), encoder-decoder and
cross-attention models, and models whose text comes out differently by ids and by embeddings.

"""
COLUMNS = ("family", "layers", "tokens of a picture", "decoding", "reuse", "notes")
NOTES = {
    "gemma4": "a picture's tokens see each other: it is read in one piece",
    "qwen3_5": "positions on three axes, recurrent layers",
    "qwen3_vl": "positions on three axes, features in the first layers too",
    "paddleocr_vl": "mlx-vlm's own processor takes one picture only",
}


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    layers: str
    n_tokens: int
    row_by_row: str
    reuse: str

    def __str__(self) -> str:
        decoding = "row by row" if self.row_by_row else "batched"
        cells = (self.name, self.layers, str(self.n_tokens), decoding, self.reuse)
        return "| " + " | ".join((*cells, NOTES.get(self.name, ""))) + " |"


def row_of(name: str) -> Row:
    build = gallery.build(name)
    verdict = check(build, name, vocab=VOCAB_SIZE, modes=MODES)
    _, make_layers = build()
    prompt = gallery.prompt_of(name, gallery.user(2))
    (span,) = prompt.picture_spans
    layers = layout(make_layers())
    reuse = verdict.status if verdict.status == "supported" else verdict.detail
    return Row(name, layers, span.end - span.start, verdict.row_by_row, reuse)


def render(rows: list[Row]) -> str:
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return HEAD + "\n".join([*head, *(str(r) for r in sorted(rows, key=lambda r: r.name))]) + "\n"


def written() -> dict[str, str]:
    lines = PATH.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    return {line.split("|")[1].strip(): line for line in rows}


def main() -> int:
    rows = []
    for name in (*VISION, *MORE_VISION):
        rows.append(row_of(name))
        print(rows[-1], flush=True)
    PATH.write_text(render(rows), encoding="utf-8")
    return 1 if any(r.reuse != "supported" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
