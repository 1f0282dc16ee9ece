"""The table in docs/metrics.md, to be compared with what a server shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[1] / "docs"
HISTOGRAM = ("_bucket", "_count", "_sum")


@dataclass(frozen=True)
class Named:
    """A metric, under the name that queries use."""

    name: str
    kind: str
    labels: frozenset[str]


def documented() -> tuple[dict[str, Named], set[str], set[str]]:
    """All metrics; the names of those that a key's owner sees; the names of a front's own."""
    found: dict[str, Named] = {}
    of_a_key: set[str] = set()
    of_the_front: set[str] = set()
    for line in (DOCS / "metrics.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not cells[0].startswith("`firn_"):
            continue
        name = cells[0].strip("`")
        assert name not in found, f"{name} is there twice"
        found[name] = Named(name, cells[1], frozenset(re.findall(r"`(\w+)`", cells[2])))
        if len(cells) == 4:
            of_the_front.add(name)
        elif cells[3] == "yes":
            of_a_key.add(name)
    return found, of_a_key, of_the_front


def shown(text: str) -> dict[str, Named]:
    """The metrics in a /metrics page, without the creation times that the client library adds."""
    found: dict[str, Named] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for s in family.samples for label in s.labels} - {"le"}
        found[name] = Named(name, family.type, frozenset(labels))
    return found
