"""The table in docs/architectures.md: one row for each architecture in the zoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from tests.sweep.checks import MODES, Build, Mode, Verdict, check
from tests.zoo import UNBUILDABLE, VOCAB_SIZE, ZOO, build
from tests.zoo.probe import layout

PATH = Path(__file__).parents[2] / "docs" / "architectures.md"

REUSE = {
    "supported": "supported",
    "chunks only": "on prefill chunks only",
    "no reuse": "served without",
    "wrong": "**wrong**",
    "unbuilt": "not tested",
}

HEAD = """# Architectures

Every model module of mlx-lm, built tiny with random weights and given the same requests with and
without the prefix cache. `make sweep` checks this table, and `python -m tools.sweep` writes it.

- *supported*: in exact mode every logit after a hit is bit for bit the uncached one; in full mode the
  tokens are the same, away from ties. Prompts are sent again, grown, branched, edited, cut short,
  continued past their reply and read in a batch, at lengths around blocks, chunks and windows, with
  blocks smaller than, larger than and equal to the prefill chunk.
- *on prefill chunks only*: the model's own result depends on where prefill is cut, so prompts resume
  only where a chunk begins, as in exact mode.
- *served without*: some layer's cache cannot be restored; answers are right, but nothing is reused.
- *not tested*: the module cannot be run here, for the reason given.
- *row by row*: mlx-lm cannot decode rows of this model together, or gets them wrong, so they take
  their steps one after the other. Reuse is not affected.

The table is about the cache; [models.md](models.md#which-calls-are-read) lists the formats of tool
calls that are read.

"""
COLUMNS = ("architecture", "module", "layers", "decoding", "reuse", "why")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    module: str
    layers: str
    verdict: Verdict

    @property
    def cells(self) -> tuple[str, ...]:
        v = self.verdict
        decoding = "" if v.status == "unbuilt" else "row by row" if v.row_by_row else "batched"
        why = "; ".join(x for x in (v.detail, v.row_by_row) if x)
        return (self.name, self.module, self.layers, decoding, REUSE[v.status], why)

    def __str__(self) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in self.cells) + " |"


def builder(name: str) -> Build:
    def made() -> tuple[Any, Callable[[], list[Any]]]:
        model = build(name)
        return model, lambda: make_prompt_cache(model)

    return made


def row_of(name: str, modes: Sequence[Mode] = MODES) -> Row:
    """Build the model and run the script."""
    entry = ZOO[name]
    verdict = check(builder(name), entry.module, vocab=VOCAB_SIZE, modes=modes)
    _, make_layers = builder(name)()
    return Row(name, entry.module, layout(make_layers()), verdict)


def unbuilt() -> list[Row]:
    return [Row(name, name, "", Verdict("unbuilt", why)) for name, why in UNBUILDABLE.items()]


def render(rows: Sequence[Row]) -> str:
    ordered = sorted(rows, key=lambda r: r.name)
    counts = {}
    for row in ordered:
        counts[row.verdict.status] = counts.get(row.verdict.status, 0) + 1
    summary = ", ".join(f"{n} {REUSE[status]}" for status, n in sorted(counts.items()))
    alone = sum(bool(r.verdict.row_by_row) for r in ordered)
    lines = [
        f"{len({r.module for r in ordered})} modules, {len(ordered)} architectures with variants: "
        f"{summary}. {alone} decode row by row.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *(str(row) for row in ordered),
    ]
    return HEAD + "\n".join(lines) + "\n"


def written() -> dict[str, str]:
    """The rows of the file, by architecture."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    return {line.split("|")[1].strip(): line for line in rows}
