"""Identity: what must share records, what must not, and records that are read by another process.

Slow: records of every kind are read by a process that must import MLX first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from firn.cache.admin.control import clear, pin, unpin
from firn.cache.arrays.host import from_host, to_host
from firn.cache.arrays.payload import Payload, evaluate, stacked
from firn.cache.codecs import Arrays
from firn.cache.prefix import PrefixCache
from firn.cache.storage.container import Header, pack, unpack
from firn.core.keys import Key
from firn.core.values import CacheControl, Namespace, PictureSpan, Prompt
from firn.models.load.fingerprint import Fingerprint
from tests.cache.lab import (
    DENSE,
    HYBRID,
    LabEngine,
    LabLayer,
    LabRow,
    Shape,
    nodes_of,
    prompt_of,
    tree,
)
from tests.cache.specimens import SPECIMENS, Specimen, all_same
from tests.hash_runner import prompt_of as words
from tests.zoo import write_folder

ROOT = Path(__file__).parents[2]


# --- the same model, the same tree ---------------------------------------------------------


def identity(folder: Path, adapter: Path | None = None, shape: Shape = DENSE) -> bytes:
    """The root of the tree that a server on this folder would use."""
    cache = tree(shape, fingerprint=Fingerprint(folder, adapter=adapter).result())
    return cache.records.identity.root(Namespace("alice"))


def adapter_of(path: Path, scale: float) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"rank": 4, "scale": 2.0}))
    mx.save_safetensors(str(path / "adapters.safetensors"), {"lora_a": scale * mx.ones((4, 8))})
    return path


def test_adapters_are_other_models_also_under_the_same_name(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_folder("llama", base)
    adapter = adapter_of(tmp_path / "adapter", 1.0)
    seen = [identity(base), identity(base, adapter)]
    shutil.rmtree(adapter)
    seen.append(identity(base, adapter_of(adapter, 1.5)))
    assert len(set(seen)) == 3
    shutil.rmtree(adapter)
    assert identity(base, adapter_of(adapter, 1.0)) == seen[1], "the first one is back"
    assert identity(base, adapter_of(tmp_path / "elsewhere", 1.0)) == seen[1]


def test_where_the_model_lies_is_not_a_part_of_it(tmp_path: Path) -> None:
    write_folder("llama", tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "other name")
    assert identity(tmp_path / "here") == identity(tmp_path / "there" / "other name")
    assert identity(tmp_path / "here") != identity(tmp_path / "here", shape=HYBRID)


def test_how_it_is_served_is_not_a_part_of_it() -> None:
    """Rows, chunk (in full mode), room: a server with other values finds the same keys."""
    roots = set()
    for limit, options in ((1 << 20, {"max_rows": 2}), (1 << 30, {"max_rows": 9, "chunk": 32})):
        cache = tree(DENSE, limit_nbytes=limit)
        with LabEngine(DENSE, cache=cache, **options) as lab:
            lab.submit(words(1, 40), 4).wait().check()
            roots.add(tuple(sorted(n.key for n in nodes_of(cache.records.tree))))
    assert len(roots) == 1


# --- pictures ------------------------------------------------------------------------------


CAT, DOG = (hashlib.sha256(x).digest() for x in (b"cat", b"dog"))


def with_pictures(*spans: tuple[int, int, bytes]) -> Prompt:
    return replace(prompt_of(words(1, 60)), picture_spans=tuple(PictureSpan(*s) for s in spans))


def store(cache: PrefixCache, prompt: Prompt) -> None:
    """Commit a whole prompt, without a model."""
    cursor = cache.open(prompt, Namespace(""), CacheControl())
    assert cursor.restore() is None
    row = LabRow(LabLayer([[]], DENSE))
    row.consume([int(t) for t in prompt.ids])
    cursor.commit(row)
    cursor.close(row)


@pytest.mark.parametrize(
    ("spans", "n_shared"),
    [
        ([(20, 30, CAT)], 60),
        ([(20, 30, DOG)], 20),
        ([], 20),
        ([(21, 31, CAT)], 20),
        ([(20, 31, CAT)], 30),
        ([(20, 25, CAT), (25, 30, CAT)], 25),
        ([(20, 30, CAT), (40, 50, DOG)], 40),
    ],
)
def test_another_picture_shares_what_comes_before_it(
    spans: list[tuple[int, int, bytes]], n_shared: int
) -> None:
    cache = tree(DENSE, block=8)
    store(cache, with_pictures((20, 30, CAT)))
    assert cache.probe(with_pictures(*spans), Namespace("")).n_shared == n_shared


# --- salts -----------------------------------------------------------------------------------


def test_a_salt_shares_nothing_with_another_and_counts_as_its_namespace() -> None:
    cache, words_60, own = tree(DENSE, block=8), prompt_of(words(1, 60)), Namespace("")
    store(cache, replace(words_60, salt="a"))
    for salt, n_shared in (("a", 60), ("b", 0), ("", 0)):
        assert cache.probe(replace(words_60, salt=salt), own).n_shared == n_shared
    assert cache.probe(replace(words_60, salt="a"), Namespace("other")).n_shared == 0
    store(cache, words_60)
    assert pin(cache, replace(words_60, salt="a"), own, cap_nbytes=1 << 20)["pinned_tokens"] == 59
    assert unpin(cache, words_60, own)["unpinned_tokens"] == 0
    assert unpin(cache, replace(words_60, salt="a"), own)["unpinned_tokens"]
    clear(cache, own)
    for salt in ("a", ""):
        assert cache.probe(replace(words_60, salt=salt), own).n_shared == 0


# --- another process -----------------------------------------------------------------------

CHILD = """
import hashlib, json, sys
from pathlib import Path
from tests.cache.test_cache_identity import SPECIMENS, arrive
print(json.dumps({kind.label: arrive(kind, Path(sys.argv[1])) for kind in SPECIMENS}))
"""
CHUNKS = (20, 5, 1, 1, 16)


def file_of(kind: Specimen, folder: Path, number: int) -> Path:
    return folder / f"{kind.label.replace(' ', '-')}.{number}"


def evaluated(layers: Sequence[Arrays]) -> Payload:
    payload = stacked(layers)
    evaluate([payload])
    return payload


def digest(arrays: Arrays) -> str:
    hasher = hashlib.sha256()
    for a in arrays:
        if a is None:
            hasher.update(b"none")
        else:
            lent = to_host(evaluated([(a,)]))
            hasher.update(repr(lent.tensors).encode())
            hasher.update(lent.fetch()[0])
    return hasher.hexdigest()


def goes_on(kind: Specimen, layer: object) -> str:
    """What the layer shows, now and after a few more tokens."""
    n = sum(CHUNKS)
    seen = [digest(kind.sees(layer, n))]
    for more in (1, 7, 1):
        kind.feed(layer, [0], [n], more)
        n += more
        seen.append(digest(kind.sees(layer, n)))
    return "".join(seen)


def leave(kind: Specimen, folder: Path) -> str:
    """Write the records of a live layer. Returns how the layer itself goes on."""
    for number, (start, end, arrays) in enumerate(kind.pieces(CHUNKS)):
        lent = to_host(evaluated([arrays]))
        header = Header(
            key=Key(b"k" * 32),
            parent=Key(b"p" * 32),
            root=Key(b"r" * 32),
            part=kind.codec.part,
            start=start,
            tokens=np.arange(start, end, dtype=np.uint64),
            fingerprint=b"model",
            namespace="alice",
            layout=str(kind.codec.describe(kind.make())),
            tensors=lent.tensors,
            places=lent.places,
            created=0.0,
            mark=0,
        )
        raw = b"".join(bytes(p) for p in pack(header, lent.fetch()).pieces)
        file_of(kind, folder, number).write_bytes(raw)
    return goes_on(kind, kind.fed(CHUNKS))


def arrive(kind: Specimen, folder: Path) -> str:
    """Restore a layer from the files of another process."""
    pieces = []
    for number in range(len(CHUNKS)):
        loaded = unpack(file_of(kind, folder, number).read_bytes())
        header = loaded.header
        assert header.part is kind.codec.part
        assert header.layout == kind.codec.describe(kind.make())
        arrays = from_host(header.tensors, header.places, loaded.buffers).layer(0)
        pieces.append((header.start, header.start + len(header.tokens), arrays))
    return goes_on(kind, kind.restored(pieces, sum(CHUNKS)))


def test_records_of_every_kind_go_on_in_a_fresh_process(tmp_path: Path) -> None:
    """Quantised ones of each width with their scales, bfloat16 with its bits, empty slots empty."""
    want = {kind.label: leave(kind, tmp_path) for kind in SPECIMENS}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == want


@pytest.mark.parametrize("kind", SPECIMENS, ids=lambda s: s.label)
def test_host_bytes_are_the_arrays(kind: Specimen) -> None:
    (*_, (_, _, arrays)) = kind.pieces(CHUNKS)
    lent = to_host(evaluated([arrays]))
    buffers = lent.fetch()
    assert sum(b.nbytes for b in buffers) == sum(a.nbytes for a in arrays if a is not None)
    copies = [memoryview(bytes(b)) for b in buffers]
    again = from_host(lent.tensors, lent.places, copies).layer(0)
    assert all_same(again, arrays)
