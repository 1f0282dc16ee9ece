"""The order of eviction, against a model that looks at everything each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firn.cache.parts import Part
from firn.cache.tiers import Name
from firn.cache.tiers._catalog import DAY_S, SETTLED_S, Catalog, File
from firn.core.keys import Key

KEYS = [Key(bytes([i]) * 32) for i in range(7)]
PARENT = {KEYS[0]: None, **{KEYS[i]: KEYS[(i - 1) // 2] for i in range(1, 7)}}
"""A binary tree of seven blocks."""

files = st.tuples(st.sampled_from(KEYS), st.sampled_from(Part))


def path(key: Key, part: Part) -> str:
    return f"{key[0]}.{part.value}"


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog()
        self.now = 0.0
        self.model: dict[str, tuple[Key | None, Part, float, int]] = {}
        self.created: dict[str, float] = {}

    def tick(self) -> float:
        self.now += 25.0  # some are used again soon, some late
        return self.now

    @rule(which=files, nbytes=st.integers(1, 9))
    def add(self, which: tuple[Key, Part], nbytes: int) -> None:
        key, part = which
        if path(key, part) in self.model:
            return
        now = self.tick()
        self.created[path(key, part)] = now
        file = File(path(key, part), nbytes, now, Name(key, part), PARENT[key], readable=True)
        file.created, file.is_shared = now, part is Part.STATE
        self.catalog.add(file)
        self.model[path(key, part)] = (key, part, now, nbytes)

    @rule(n=st.integers(0, 3))
    def add_foreign(self, n: int) -> None:
        if f"foreign{n}" not in self.model:
            now = self.tick()
            self.catalog.add(File(f"foreign{n}", 3, now))
            self.model[f"foreign{n}"] = (None, Part.PAGES, now, 3)

    @rule(which=files)
    def remove(self, which: tuple[Key, Part]) -> None:
        found = self.catalog.remove(path(*which))
        assert (found is not None) == (self.model.pop(path(*which), None) is not None)

    @rule(which=files)
    def touch(self, which: tuple[Key, Part]) -> None:
        file = self.catalog.get(path(*which))
        if file is not None:
            now = self.tick()
            self.catalog.touch(file, now)
            key, part, _, nbytes = self.model[file.path]
            self.model[file.path] = (key, part, now, nbytes)

    @precondition(lambda self: self.model)
    @rule(pinned=st.sets(st.sampled_from(KEYS), max_size=2))
    def evict(self, pinned: set[Key]) -> None:
        def may_go(file: File) -> bool:
            return file.name is None or file.name.key not in pinned

        victim = self.catalog.pop_victim(may_go)
        allowed = {
            p
            for p, (key, _, _, _) in self.model.items()
            if self.at_end(p) and (key is None or key not in pinned)
        }
        if victim is None:
            assert not allowed
            return
        assert victim.path in allowed
        best = min(allowed, key=lambda p: (self.usable(p), self.model[p][2] + self.value(p)))
        assert victim.path == best
        del self.model[victim.path]

    @rule()
    def evict_all(self) -> None:
        """Whatever is there can be got rid of: nothing keeps itself alive."""
        while self.catalog.pop_victim() is not None:
            pass
        self.model.clear()
        assert len(self.catalog) == 0

    def value(self, p: str) -> float:
        key, part, last_use, _ = self.model[p]
        if key is None:
            return 0.0
        value = DAY_S if last_use > self.created[p] + SETTLED_S else 0.0
        inside = any(PARENT[k] == key for k in self.blocks())
        return value - (DAY_S if inside and part is Part.WINDOW else 0.0)

    def blocks(self) -> dict[Key, set[Part]]:
        found: dict[Key, set[Part]] = {}
        for key, part, _, _ in self.model.values():
            if key is not None:
                found.setdefault(key, set()).add(part)
        return found

    def usable(self, p: str) -> bool:
        key = self.model[p][0]
        if key is None:
            return False
        parent = PARENT[key]
        return parent is None or parent in self.blocks()

    def at_end(self, p: str) -> bool:
        key, part, _, _ = self.model[p]
        if key is None or not self.usable(p):
            return True
        parts = self.blocks()[key]
        has_children = any(PARENT[k] == key for k in self.blocks())
        if part is Part.PAGES:
            return parts == {Part.PAGES} and not has_children
        return not has_children or len(parts) > 1

    @invariant()
    def sums_agree(self) -> None:
        assert self.catalog.nbytes == sum(n for *_, n in self.model.values())
        assert len(self.catalog) == len(self.model)
        orphans = {k for k, *_ in self.model.values() if k is not None and not self._rooted(k)}
        assert self.catalog.n_orphans == len(orphans)
        for part in Part:
            mine = [n for k, p, _, n in self.model.values() if p is part and k is not None]
            assert self.catalog.n_files[part] == len(mine)
            assert self.catalog.part_nbytes[part] == sum(mine)

    def _rooted(self, key: Key) -> bool:
        parent = PARENT[key]
        return parent is None or parent in self.blocks()


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
