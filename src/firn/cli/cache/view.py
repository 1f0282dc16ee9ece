"""The commands of `firn cache` that only read: ls, show, where, stats. They take no lock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from firn.cache.admin.inventory import BlockFiles, Inventory, ModelRecords, Prefix, prefixes
from firn.cache.parts import Part
from firn.cache.storage.container import Header, load
from firn.cli.cache.work import CacheFolder
from firn.cli.client import ChatClient
from firn.cli.terminal import plain_console, size
from firn.core.errors import FirnError

KEY_DIGITS = 64
"""Digits of a whole key."""
SHORT = 12
"""Digits of a key that are shown: enough to tell records apart."""
IMAGE_BIT = 1 << 63
N_TOKENS_SHOWN = 32


def ago(then: float, now: float) -> str:
    seconds = max(now - then, 0.0)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"


def _name_of(group: ModelRecords) -> str:
    return group.model.name or f"model {group.fingerprint.hex()[:SHORT]}"


# --- ls ------------------------------------------------------------------------------------


def ls(location: CacheFolder, *, top: int) -> None:
    inventory = location.inventory()
    groups = inventory.by_model()
    console = plain_console()
    if not inventory.files:
        console.print(f"Nothing is stored in {location.folder}.", markup=False)
        return
    console.print(_table(groups), soft_wrap=False)
    for group in groups if top else ():
        console.print()
        console.print(_tree(group, top), soft_wrap=False)
    others = [
        f"{len(inventory.faulty)} unusable files",
        f"{inventory.n_locked} encrypted with another key",
    ]
    shown = [text for text in others if not text.startswith("0 ")]
    if shown:
        console.print(f"\nAlso {' and '.join(shown)}.")


def _table(groups: Sequence[ModelRecords]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold", min_width=8)
    for column in ("fingerprint", "namespace"):
        table.add_column(column, overflow="fold", min_width=4)
    for column in ("records", "tokens", "size", "last used"):
        table.add_column(column, justify="right", no_wrap=True)
    now = time.time()
    for group in groups:
        table.add_row(
            Text(group.model.name or "-"),
            group.fingerprint.hex()[:SHORT],
            Text(group.namespace[:SHORT]),
            f"{group.n_records:,}",
            f"{group.n_tokens:,}" if group.n_tokens else "?",
            size(group.nbytes),
            ago(group.last_use, now),
        )
    return table


def _tree(group: ModelRecords, top: int) -> Tree:
    title = f"largest prefixes of {_name_of(group)}, namespace {group.namespace[:SHORT]}"
    tree = Tree(Text(title), guide_style="dim")
    now = time.time()

    def grow(branch: Tree, prefix: Prefix) -> None:
        node = branch.add(Text(_line(prefix, now)))
        for longer in prefix.branches:
            grow(node, longer)

    for prefix in prefixes(group.blocks, top=top):
        grow(tree, prefix)
    return tree


def _line(prefix: Prefix, now: float) -> str:
    first, last = prefix.blocks[0], prefix.blocks[-1]
    n_blocks = f"{len(prefix.blocks)} block{'s' * (len(prefix.blocks) != 1)}"
    own_nbytes = sum(b.nbytes for b in prefix.blocks)
    more = f" ({size(prefix.nbytes)} with what follows)" if prefix.nbytes > own_nbytes else ""
    return (
        f"{last.tag.key.hex()[:SHORT]}  tokens [{first.tag.start}, {last.end})  {n_blocks}, "
        f"{size(own_nbytes)}{more}, {ago(prefix.last_use, now)}"
    )


# --- show ----------------------------------------------------------------------------------


def show(location: CacheFolder, key: str, *, model: str | None, whole: bool) -> None:
    inventory = location.inventory()
    block = inventory.find(key)
    console = plain_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for topic, text in _facts(inventory, block):
        table.add_row(topic, Text(text))
    console.print(table)
    for part, file in block.files.items():
        if file.label is None:
            console.print(f"\n{part.value}: encrypted with another key")
            continue
        header = load(location.tier(), file.label.name, seal=location.seal).header
        console.print(f"\n{part.value}: {size(file.nbytes)}", style="bold")
        for line in _layer_lines(header):
            console.print(f"  {line}", markup=False)
    tokens = _tokens(inventory, block, whole=whole)
    if tokens:
        console.print()
        console.print(_text_of(tokens, model or _recorded_model(inventory, block)), markup=False)


# --- where ---------------------------------------------------------------------------------


def where(client: ChatClient, location: CacheFolder, key: str) -> None:
    """What a running server says of a block."""
    if len(key) < KEY_DIGITS:
        key = location.inventory().find(key).tag.key.hex()
    block = client.stored_block(key)
    console = plain_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("key", block["node"])
    table.add_row("prefix", f"{block['tokens']:,} tokens, {size(block['bytes'])}")
    for part, text in block["where"].items():
        table.add_row(Text(str(part)), Text(str(text)))
    console.print(table)


# --- facts of a block ----------------------------------------------------------------------


def _facts(inventory: Inventory, block: BlockFiles) -> list[tuple[str, str]]:
    tag = block.tag
    model = inventory.models.get(tag.fingerprint)
    label = next((f.label for f in block.files.values() if f.label is not None), None)
    children = [b for b in inventory.blocks.values() if b.parent == tag.key]
    now = time.time()
    facts = [
        ("key", tag.key.hex()),
        ("parent", "none: it begins a chain" if block.parent is None else block.parent.hex()),
        ("followed by", ", ".join(b.tag.key.hex()[:SHORT] for b in children) or "nothing"),
        ("model", f"{model.name} ({tag.fingerprint.hex()})" if model else tag.fingerprint.hex()),
        ("namespace", tag.namespace),
        ("made", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(tag.created))),
        ("last used", ago(block.last_use, now)),
    ]
    if label is not None:
        facts.insert(3, ("tokens", f"[{tag.start}, {block.end})"))
        facts.append(("layout", label.layout))
    return facts


def _layer_lines(header: Header) -> list[str]:
    """The layers of a record; neighbours that are equal share a line."""

    def text(at: tuple[int, int] | None) -> str:
        if at is None:
            return "empty"
        stack = header.tensors[at[0]]
        return f"{stack.dtype} {stack.shape[1:]}"

    texts = [", ".join(map(text, slots)) or "nothing" for slots in header.places]
    lines, at = [], 0
    for same, equal in groupby(texts):
        n = len(list(equal))
        which = f"layer {at}" if n == 1 else f"layers {at}-{at + n - 1}"
        lines.append(f"{which}: {same}")
        at += n
    return lines


def _tokens(inventory: Inventory, block: BlockFiles, *, whole: bool) -> list[int]:
    chain = inventory.chain(block) if whole else [block]
    tokens: list[int] = []
    for link in chain:
        label = next((f.label for f in link.files.values() if f.label is not None), None)
        if label is None:
            return []
        tokens += [int(t) for t in label.tokens]
    return tokens


def _recorded_model(inventory: Inventory, block: BlockFiles) -> str | None:
    model = inventory.models.get(block.tag.fingerprint)
    return model.path if model and Path(model.path).is_dir() else None


def _text_of(tokens: list[int], model: str | None) -> str:
    """The text if a tokenizer can be loaded, otherwise the first token ids."""
    ids = ", ".join(map(str, tokens[:N_TOKENS_SHOWN]))
    numbers = f"tokens: {ids}{', ...' if len(tokens) > N_TOKENS_SHOWN else ''}"
    if model is None:
        return numbers
    try:
        from firn.models.load.loader import load_tokenizer

        tokenizer = load_tokenizer(Path(os.path.expanduser(model)))
    except (FirnError, ImportError) as e:
        return f"{numbers}\n(no text: {e})"
    pieces: list[str] = []
    for is_image, run in groupby(tokens, key=lambda t: t >= IMAGE_BIT):
        values = list(run)
        text = f"<image: {len(values)} tokens>" if is_image else tokenizer.decode(values)
        pieces.append(text)
    return "".join(pieces)


# --- stats ---------------------------------------------------------------------------------


def stats(location: CacheFolder) -> dict[str, Any]:
    inventory = location.inventory()
    usage = location.usage()
    files = inventory.files
    by_part = {p: [f for f in files if f.tag and f.tag.part is p] for p in Part}
    return {
        "folder": str(location.folder),
        "limit_bytes": usage.limit_nbytes,
        "bytes": sum(f.nbytes for f in files) + usage.quarantined_nbytes,
        "records": len(files),
        "tokens": sum(b.n_tokens for b in inventory.blocks.values()),
        "parts": {
            part.value: {"records": len(some), "bytes": sum(f.nbytes for f in some)}
            for part, some in by_part.items()
        },
        "models": len({b.tag.fingerprint for b in inventory.blocks.values()}),
        "namespaces": len({b.tag.namespace for b in inventory.blocks.values()}),
        "locked": inventory.n_locked,
        "unusable": len(inventory.faulty),
        "orphans": len(inventory.orphans),
        "quarantine": {"files": usage.n_quarantined, "bytes": usage.quarantined_nbytes},
        "being_written": usage.n_being_written,
        "bytes_written_last_24_hours": usage.day_nbytes,
        "oldest_use": min((f.used_at for f in files), default=None),
    }


def show_stats(location: CacheFolder, *, as_json: bool) -> None:
    numbers = stats(location)
    if as_json:
        print(json.dumps(numbers, indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _stat_lines(numbers):
        table.add_row(name, Text(text))
    plain_console().print(table)


def _stat_lines(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    limit = numbers["limit_bytes"]
    written = numbers["bytes_written_last_24_hours"]
    parts = ", ".join(
        f"{name} {part['records']:,} ({size(part['bytes'])})"
        for name, part in numbers["parts"].items()
    )
    bad = numbers["quarantine"]
    return [
        ("folder", numbers["folder"]),
        ("size", f"{size(numbers['bytes'])} of {size(limit) if limit else 'no limit known'}"),
        ("records", f"{numbers['records']:,}: {parts}"),
        ("tokens", f"{numbers['tokens']:,}"),
        ("models", f"{numbers['models']}, in {numbers['namespaces']} namespaces"),
        ("written", f"{size(written or 0)} in the last 24 hours"),
        (
            "not usable",
            f"{numbers['unusable']} unusable, {numbers['locked']} encrypted with another key",
        ),
        ("orphans", str(numbers["orphans"])),
        ("quarantine", f"{bad['files']} files, {size(bad['bytes'])}"),
    ]
