"""Counts the shape of the sources: `python tools/house.py [FOLDER]`, by default src/firn beside it.

docs/decisions.md compares two commits by these numbers; `tests/test_structure.py` keeps them. Everything
is read from the syntax tree: nothing is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

Graph = dict[str, set[str]]
DEVICES = frozenset({"cuda", "metal", "nvidia", "gpu", "traced"})
"""Words of names by which code asks which device it runs on, whole or as a part of a name."""
DEVICE_PHRASES = ("few_shapes", "on_cpu", "is_cpu", "cpu_only", "default_device", "device_info")
DEVICE_CALLS = frozenset({"mx.cpu", "mx.gpu", "mx.metal", "mx.cuda"})
OPENINGS = ("...", "Nor ", "Likewise", "The same")
"""How a docstring must not begin: it would need the one before it."""
MAX_ATTRIBUTES = 20
CORE = frozenset({
    "__init__", "api", "app", "assembly", "backends", "cache", "config", "core", "engine", "host",
    "listener", "logs", "media", "models", "text", "welcome",
})  # fmt: skip
"""What a server of one model consists of: packages and modules at the top, but for what is in EXTRAS."""
EXTRAS = (
    "api/dialects/_ollama", "api/dialects/ollama_chat", "api/dialects/ollama_generate",
    "api/routes/embeddings", "api/routes/load", "api/routes/ollama", "api/routes/ollama_fields",
    "api/routes/rerank",
    "assembly/extras/documents", "assembly/extras/embeddings", "assembly/extras/kv_events",
    "assembly/extras/rerank", "assembly/extras/sparse", "assembly/extras/traces",
    "backends/cpu", "backends/cuda", "backends/recurrence",
    "bench",
    "cache/tiers/_bandwidth", "cache/tiers/_calls", "cache/tiers/_store",
    "cache/tiers/redis", "cache/tiers/s3",
    "fleet",
    "kv_events",
    "media/documents", "media/pdf_text",
    "models/embedder",
    "ranks",
    "sparse",
    "text/prompt/rerank",
    "traces",
)  # fmt: skip
"""What the core does not name: folders and files below src/firn, without .py."""
COMMANDS = frozenset({"__main__", "cli", "demo"})
"""What starts a server, or looks at one: it names both."""
LIBRARIES = ("mlx", "mlx_lm", "mlx_vlm", "transformers")


class Tree:
    """Python files below a folder, by module name."""

    def __init__(self, folder: Path) -> None:
        self.modules = {
            ".".join(("firn", *path.relative_to(folder).with_suffix("").parts)).removesuffix(
                ".__init__"
            ): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(folder.rglob("*.py"))
        }
        self.n_lines = sum(
            len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")
        )
        self.packages = {
            ".".join(("firn", *path.parent.relative_to(folder).parts))
            for path in folder.rglob("__init__.py")
        }

    def imports(self) -> Graph:
        """Which modules each module names, under TYPE_CHECKING and inside functions, too."""
        graph: Graph = {}
        for module, tree in self.modules.items():
            named: set[str] = set()
            for target in _imported(module, tree, is_package=module in self.packages):
                known = target if target in self.modules else target.rpartition(".")[0]
                named |= {known} & self.modules.keys()
            graph[module] = named - {module}
        return graph


def _imported(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[str]:
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{home}.{alias.name}" for alias in node.names)


def cycles(graph: Graph) -> list[list[str]]:
    """Modules that import each other in a circle (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


# --- core and extras -----------------------------------------------------------------------


def group_of(place: str) -> str:
    """place: a file below src/firn, without .py, or a module's name with slashes for dots."""
    if any(place == extra or place.startswith(f"{extra}/") for extra in EXTRAS):
        return "extras"
    top = place.split("/")[0]
    return "core" if top in CORE else "commands" if top in COMMANDS else "nowhere"


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Lines and files of each group."""
    found: dict[str, tuple[int, int]] = {}
    for path in folder.rglob("*.py"):
        group = group_of(path.relative_to(folder).with_suffix("").as_posix())
        n_lines, n_files = found.get(group, (0, 0))
        more = len(path.read_text(encoding="utf-8").splitlines())
        found[group] = n_lines + more, n_files + 1
    return dict(sorted(found.items()))


# --- protocols -----------------------------------------------------------------------------


def idle_protocols(modules: dict[str, ast.Module]) -> list[str]:
    """Protocols that nothing uses as a type: no annotation, cast, base of a class that is none, or
    isinstance names them."""
    protocols, used = {}, set()
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                if any(_base(base) == "Protocol" for base in node.bases):
                    protocols[node.name] = module
                else:
                    used |= {_base(base) for base in node.bases}
            used |= _names_in_types(node)
    return sorted(f"{protocols[name]}.{name}" for name in protocols.keys() - used)


def _base(node: ast.expr) -> str:
    return ast.unparse(node).split("[")[0].split(".")[-1]


def _names_in_types(node: ast.AST) -> set[str]:
    """Names in annotations, type arguments, casts and isinstance calls."""
    types: list[ast.expr | None] = []
    if isinstance(node, ast.arg | ast.AnnAssign):
        types = [node.annotation]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        types = [node.returns]
    elif isinstance(node, ast.Call) and _base(node.func) in ("cast", "isinstance", "TypeVar"):
        types = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Assign):
        types = [node.value] if isinstance(node.value, ast.Subscript | ast.BinOp) else []
    elif isinstance(node, ast.ClassDef):
        types = [s.slice for s in node.bases if isinstance(s, ast.Subscript)]
    found = set()
    for each in types:
        for part in ast.walk(each) if each is not None else ():
            if isinstance(part, ast.Name):
                found.add(part.id)
            elif isinstance(part, ast.Attribute):
                found.add(part.attr)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found |= set(re.findall(r"\w+", part.value))
    return found


# --- classes -------------------------------------------------------------------------------


def attributes(cls: ast.ClassDef) -> set[str]:
    """Attributes of a class's objects: fields, and what its methods assign to `self`."""
    found = set()
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def large_classes(modules: dict[str, ast.Module]) -> dict[str, int]:
    """Classes with more than MAX_ATTRIBUTES, and how many they have."""
    found = {}
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and len(attributes(node)) > MAX_ATTRIBUTES:
                found[f"{module}.{node.name}"] = len(attributes(node))
    return found


# --- callables -----------------------------------------------------------------------------


def callables_taken(modules: dict[str, ast.Module]) -> list[str]:
    """Parameters that are functions to call back: of functions, and fields that a dataclass is made
    with. A name for a kind of function (`Done = Callable[...]`) is one, wherever it is defined."""
    kinds = {"Callable"}
    for tree in modules.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _base(node.value) == "Callable":
                kinds |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            for name, annotation in _taken(node):
                if annotation is not None and kinds & _words(annotation):
                    found.append(f"{module}:{annotation.lineno}: {name}")
    return found


def _taken(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        spec = node.args
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
        yield from ((f"{node.name}({a.arg})", a.annotation) for a in every if a is not None)
    elif isinstance(node, ast.ClassDef) and any("dataclass" in _base(d) for d in _calls(node)):
        fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
        yield from ((f"{node.name}.{ast.unparse(f.target)}", f.annotation) for f in fields)


def _calls(node: ast.ClassDef) -> list[ast.expr]:
    return [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]


def _words(annotation: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}


# --- docstrings ----------------------------------------------------------------------------


def strings_as_docs(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and those below constants and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for inner in body if isinstance(body, list) else ():
            value = inner.value if isinstance(inner, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def leaning_docs(modules: dict[str, ast.Module]) -> list[str]:
    """Docstrings that cannot be read without the one before."""
    return [
        f"{module}:{node.lineno}: {str(node.value)[:40]}"
        for module, tree in modules.items()
        for node in strings_as_docs(tree)
        if str(node.value).lstrip().startswith(OPENINGS)
    ]


# --- devices -------------------------------------------------------------------------------


def devices_in(tree: ast.Module) -> list[str]:
    """Where code names a device: names, attributes, texts and parts of texts; docstrings aside."""
    docs = {id(node) for node in strings_as_docs(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words = set(re.findall(r"[a-z_]+", node.value.lower()))
            if words & {*DEVICES, *DEVICE_PHRASES} or node.value.strip().lower() == "cpu":
                found.append(f"{node.lineno}: {node.value!r}")
            continue
        for name in _names(node):
            parts = {w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            is_phrase = any(phrase in name.lower() for phrase in DEVICE_PHRASES)
            if parts & DEVICES or is_phrase or _dotted(node) in DEVICE_CALLS:
                found.append(f"{getattr(node, 'lineno', 0)}: {name}")
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.arg | ast.keyword):
        return [node.arg or ""]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.alias):
        return [node.name, node.asname or ""]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return list(node.names)
    if isinstance(node, ast.MatchAs | ast.MatchStar):
        return [node.name or ""]
    return []


def _dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


# --- constants -----------------------------------------------------------------------------


def constants_in(tree: ast.Module) -> list[str]:
    """Names in capitals that are assigned a number, or numbers, at the top of a module. A tuple of names
    counts as so many."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_number(node.value):
            named = [n.id for t in _targets(node) for n in ast.walk(t) if isinstance(n, ast.Name)]
            found += [name for name in named if name.strip("_").isupper()]
    return found


def _is_number(value: ast.expr | None) -> bool:
    """Whether it is made of numbers alone, perhaps calculated."""
    nodes = list(ast.walk(value)) if value is not None else []
    constants = [n.value for n in nodes if isinstance(n, ast.Constant)]
    numbers = [c for c in constants if isinstance(c, int | float) and not isinstance(c, bool)]
    return (
        bool(numbers) and numbers == constants and not any(isinstance(n, ast.Call) for n in nodes)
    )


# --- patches -------------------------------------------------------------------------------


def replacements(tree: ast.Module) -> Iterator[str]:
    """Where code gives an attribute of a library's module or class another value."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {a.asname or a.name: node.module or "" for a in node.names}
        else:
            continue
        foreign |= {name for name, home in names.items() if home.split(".")[0] in LIBRARIES}
    for node in ast.walk(tree):
        for target in _targets(node):
            owner: ast.expr = target
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            is_attribute = isinstance(target, ast.Attribute | ast.Subscript)
            if is_attribute and isinstance(owner, ast.Name) and owner.id in foreign:
                yield f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        return [ast.Attribute(node.args[0], "")]
    return []


# --- branches ------------------------------------------------------------------------------


STRATEGIES = frozenset({
    "speculation", "speculator", "mtp", "head", "traced", "trace", "shapes", "buckets", "threads",
    "drafter", "backlog", "arguments", "execution", "pipeline", "batched",
})  # fmt: skip
"""Names of what decodes in another way."""


def optional_strategies(tree: ast.Module) -> list[str]:
    """Where code asks whether a strategy is there: `x is None`, `x is not None`, `if x`, `x or Y()`,
    where the last part of x's name says that it is one."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            asked = [node.left] if ast.unparse(node.comparators[0]) == "None" else []
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            asked = [node.test]
        elif isinstance(node, ast.BoolOp):
            asked = node.values[:-1]
        for expression in asked:
            if isinstance(expression, ast.Name | ast.Attribute):
                last = ast.unparse(expression).split(".")[-1].strip("_")
                if last in STRATEGIES:
                    found.append(f"{node.lineno}: {ast.unparse(expression)}")
    return found


def _files(tree: Tree, *places: str) -> Iterable[tuple[str, ast.Module]]:
    for module, parsed in tree.modules.items():
        if any(module == place or module.startswith(f"{place}.") for place in places):
            yield module, parsed


def _by_room(tree: Tree) -> list[str]:
    """How many numeric constants each room has, the most first."""
    rooms: Counter[str] = Counter()
    for module, parsed in tree.modules.items():
        parts = module.split(".")[1:] or ["firn"]
        n_parts = 2 if parts[0] in ("models", "cache") and len(parts) > 2 else 1
        rooms["/".join(parts[:n_parts])] += len(constants_in(parsed))
    return [f"{room} {n}" for room, n in rooms.most_common() if n]


RUNNERS = ("firn.models.runner", "firn.models.decode.runner")
BACKENDS = ("firn.backends", "firn.models.cuda", "firn.models.cpu", "firn.models.device")
DECODE = ("firn.models.decode", "firn.models.ranks", "firn.models.runner")


def main() -> None:
    here = Path(__file__).resolve().parent.parent / "src" / "firn"
    folders = [argument for argument in sys.argv[1:] if argument != "-v"]
    folder = Path(folders[0]) if folders else here
    tree = Tree(folder)
    rings = cycles(tree.imports())
    outside = {
        module: parsed
        for module, parsed in tree.modules.items()
        if not any(module == home or module.startswith(f"{home}.") for home in BACKENDS)
    }
    large = large_classes(tree.modules)
    in_cache = dict(_files(tree, "firn.cache"))
    in_devices = {m: devices_in(parsed) for m, parsed in outside.items()}
    patched = {m: list(replacements(parsed)) for m, parsed in tree.modules.items()}
    rows: list[tuple[str, object]] = [
        ("lines, files", (tree.n_lines, len(tree.modules))),
        *((f"lines, files: {group}", size) for group, size in sizes(folder).items()),
        ("import cycles; modules in them", (len(rings), sum(map(len, rings)))),
        ("protocols nobody uses as a type", len(idle_protocols(tree.modules))),
        ("classes over 20 attributes; the most", (len(large), max(large.values(), default=0))),
        ("callables that the cache takes", len(callables_taken(in_cache))),
        ("docstrings that lean on the one before", len(leaning_docs(tree.modules))),
        ("places outside backends that name a device", sum(map(len, in_devices.values()))),
        ("numeric constants", sum(len(constants_in(parsed)) for parsed in tree.modules.values())),
        ("statements that patch MLX, outside the list", sum(map(len, patched.values()))),
    ]
    for module, parsed in _files(tree, *RUNNERS):
        targets = tree.imports()[module]
        n_lines = max(getattr(n, "end_lineno", 0) or 0 for n in ast.walk(parsed))
        rows.append((f"{module}: lines, imports of firn's", (n_lines, len(targets))))
        rows.append((f"{module}: asks for a strategy", len(optional_strategies(parsed))))
    if "-v" in sys.argv:
        listing: dict[str, object] = defaultdict(list)
        listing["cycles"], listing["protocols"] = rings, idle_protocols(tree.modules)
        listing["callables"] = callables_taken(in_cache)
        listing["classes"], listing["docs"] = large, leaning_docs(tree.modules)
        listing["devices"] = {m: d for m, d in in_devices.items() if d}
        listing["constants"] = _by_room(tree)
        listing["patches"] = {m: d for m, d in patched.items() if d}
        for name, value in listing.items():
            print(name, value, sep="\n  ")
    for name, value in rows:
        print(f"{name:50} {value}")


if __name__ == "__main__":
    main()
