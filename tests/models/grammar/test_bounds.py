"""No grammar ends the server: every construct, many times over, nested, and with large numbers.

What kills a process is compiled in another one first (`trial`); else these tests would not end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from firn.core.errors import InvalidValue
from firn.core.values import Grammar
from firn.models.decode.masks import Masks
from firn.models.grammar.compiler import TOO_COSTLY
from tests.models.grammar.grammar_lab import N_VOCAB, compiler, tokenizer

Schema = dict[str, Any]
SIZES = (30_000, 150_000)
N_STEPS = 16


def names(n: int) -> list[str]:
    return [f"a{i}" for i in range(n)]


def nested(wrap: Callable[[Schema], Schema], inner: Schema, n: int) -> Schema:
    for _ in range(min(n, 95)):  # a body is no deeper
        inner = wrap(inner)
    return inner


def chain(n: int, wrap: Callable[[Schema], Schema]) -> Schema:
    defs = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$defs": {**defs, f"d{n}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def text(**asked: Any) -> Schema:
    return {"type": "string", **asked}


def obj(**asked: Any) -> Schema:
    return {"type": "object", **asked}


def array(**asked: Any) -> Schema:
    return {"type": "array", **asked}


SCHEMAS: dict[str, Callable[[int], Any]] = {
    "type": lambda n: {"type": ["string", "integer"] * n},
    "enum": lambda n: {"enum": names(n)},
    "enum of objects": lambda n: {"enum": [{"a": i} for i in range(n)]},
    "enum of a list": lambda n: {"enum": [list(range(n))]},
    "const": lambda n: {"const": "a" * n},
    "const object": lambda n: {"const": dict.fromkeys(names(n), 1)},
    "properties": lambda n: obj(properties={name: {} for name in names(n)}),
    "required": lambda n: obj(required=names(n)),
    "both": lambda n: obj(properties={name: {} for name in names(n)}, required=names(n)),
    "a name": lambda n: obj(properties={"a" * n: {}}, required=["a" * n]),
    "patternProperties": lambda n: obj(patternProperties={f"^{name}$": {} for name in names(n)}),
    "additionalProperties": lambda n: nested(lambda s: obj(additionalProperties=s), {}, n),
    "propertyNames": lambda n: obj(propertyNames={"enum": names(n)}),
    "dependentRequired": lambda n: obj(dependentRequired={name: ["b"] for name in names(n)}),
    "dependentSchemas": lambda n: obj(dependentSchemas={name: {} for name in names(n)}),
    "minProperties": lambda n: obj(minProperties=n),
    "maxProperties": lambda n: obj(maxProperties=n),
    "items": lambda n: nested(lambda s: array(items=s), {}, n),
    "prefixItems": lambda n: array(prefixItems=[{"type": "integer"}] * n, minItems=n),
    "minItems": lambda n: array(items={"type": "integer"}, minItems=n),
    "maxItems": lambda n: array(items={"type": "integer"}, maxItems=n),
    "items of items": lambda n: nested(lambda s: array(items=s, minItems=3, maxItems=n), {}, n),
    "contains": lambda n: array(contains={"enum": names(n)}),
    "minLength": lambda n: text(minLength=n),
    "maxLength": lambda n: text(maxLength=n, pattern="^(ab)*$"),
    "pattern": lambda n: text(pattern="a" * n),
    "pattern of options": lambda n: text(pattern="^" + "a?" * n + "$"),
    "pattern of alternatives": lambda n: text(pattern="|".join(names(n))),
    "pattern of groups": lambda n: text(pattern="(" * n + ")" * n),
    "pattern of repetitions": lambda n: text(pattern=f"^((a{{1,{n}}}b){{1,{n}}}c){{1,{n}}}$"),
    "format": lambda n: {"anyOf": [text(format="date-time")] * n},
    "multipleOf": lambda n: {"type": "integer", "multipleOf": 7 * n + 1},
    "multipleOf between": lambda n: {"multipleOf": 0.001, "minimum": -n, "maximum": n},
    "minimum": lambda n: {"type": "integer", "minimum": int("9" * 300)},
    "anyOf": lambda n: {"anyOf": [{"const": i} for i in range(n)]},
    "anyOf of objects": lambda n: {"anyOf": [obj(properties={name: {}}) for name in names(n)]},
    "anyOf of references": lambda n: {"$defs": {"d": {}}, "anyOf": [{"$ref": "#/$defs/d"}] * n},
    "anyOf in anyOf": lambda n: nested(lambda s: {"anyOf": [s, {"type": "null"}]}, {}, n),
    "oneOf": lambda n: {"oneOf": [{"const": i} for i in range(n)]},
    "allOf": lambda n: {"allOf": [{"minimum": i} for i in range(n)]},
    "allOf of objects": lambda n: obj(allOf=[{"required": [name]} for name in names(n)]),
    "allOf of unions": lambda n: {"allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}] * n},
    "allOf of patterns": lambda n: text(allOf=[{"pattern": name} for name in names(n)]),
    "not": lambda n: nested(lambda s: {"not": s}, {}, n),
    "if": lambda n: {"allOf": [{"if": {"const": i}, "then": {}} for i in range(n)]},
    "$defs": lambda n: {"$defs": {name: {} for name in names(n)}, "$ref": "#/$defs/a0"},
    "$ref in line": lambda n: chain(n, lambda ref: ref),
    "$ref through lists": lambda n: chain(n, lambda ref: array(items=ref)),
    "$ref in members": lambda n: chain(n, lambda ref: obj(properties={"a": ref, "b": ref})),
    "$ref in all": lambda n: chain(n, lambda ref: {"allOf": [ref, ref]}),
    "$anchor": lambda n: {
        "$defs": {f"d{i}": {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(n)},
        "$ref": "#a0",
    },
    "$id": lambda n: {"$id": "http://x/y", "items": {"$id": "http://x/z", **chain(n, lambda r: r)}},
    "description": lambda n: {"description": "a" * n},
    "unknown": lambda n: dict.fromkeys(names(n), 1),
    "whitespace": lambda n: obj(**{"x-guidance": {"whitespace_pattern": f"( ?){{{n}}}"}}),
}
REGEXES: dict[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "options": lambda n: "a?" * n,
    "stars": lambda n: "a*" * n,
    "dots": lambda n: ".*" * n,
    "groups": lambda n: "(" * n + ")" * n,
    "options in options": lambda n: "(a" * n + ")?" * n,
    "alternatives": lambda n: "|".join(names(n)),
    "empty alternatives": lambda n: "|" * n,
    "optional alternatives": lambda n: "(a|b|c)?" * n,
    "words": lambda n: f"({'|'.join(names(n))})*",
    "classes": lambda n: r"\p{L}" * n,
    "a class": lambda n: f"[{''.join(chr(0x4E00 + 2 * i) for i in range(min(n, 9000)))}]",
    "a count": lambda n: f"a{{{n}}}",
    "counts of counts": lambda n: f"((a{{1,{n}}}){{1,{n}}}){{1,{n}}}",
    "many states": lambda n: f"(a|b)*a(a|b){{{min(n, 2000)}}}",
}
LARKS: dict[str, Callable[[int], str]] = {
    "letters": lambda n: f'start: "{"a" * n}"',
    "alternatives": lambda n: "start: " + " | ".join(f'"{name}"' for name in names(n)),
    "rules": lambda n: f"start: {' '.join(names(n))}\n" + "\n".join(f'a{i}: "x"' for i in range(n)),
    "rules in line": lambda n: "start: a0\n" + lines(n, 'a{}: "x" a{}') + f'a{n}: "y"',
    "terminals in line": lambda n: "start: A0\n" + lines(n, 'A{}: "x" A{}') + f'A{n}: "y"',
    "groups": lambda n: "start: " + "(" * n + '"a"' + ")" * n,
    "options": lambda n: "start: " + '"a"? ' * n,
    "options of a terminal": lambda n: "start: A\nA: " + '"a"? ' * n,
    "rules that may be empty": lambda n: (
        f"start: {' '.join(names(n))}\n" + lines(n, 'a{}: "" | "x{}"')
    ),
    "a regex": lambda n: "start: /" + "a?" * n + "/",
    "regexes": lambda n: "start: " + "|".join(f"/{name}+/" for name in names(n)),
    "intersections": lambda n: "start: A\nA: " + " & ".join(f"/.*{name}.*/" for name in names(n)),
    "a count": lambda n: f'start: a{{0,{n}}}\na: ("b" "c"){{0,{n}}}',
    "ambiguity": lambda n: (
        "start: a*\na: a a | " + " | ".join(f'"b" "{name}"' for name in names(n))
    ),
    "ranges": lambda n: "start: " + "|".join(['"a".."b"'] * n),
    "lazy": lambda n: f"start: {' '.join(names(n))}\n" + lines(n, "a{}[lazy]: /x+y{}/"),
    "limits": lambda n: f"start: {' '.join(names(n))}\n" + lines(n, "a{}[max_tokens=3]: /x{}/"),
    "ignored": lambda n: 'start: "a"\n' + lines(n, "%ignore /b{}{}/"),
    "schemas": lambda n: "start: " + ' %json {"type": "integer"}' * n,
    "a deep schema": lambda n: "start: %json " + '{"items":' * n + "{}" + "}" * n,
    "tokens": lambda n: "start: " + "<[5]> " * n,
}


def lines(n: int, line: str) -> str:
    return "".join(line.format(i, i + 1) + "\n" for i in range(n))


CASES = {
    **{f"schema: {name}": ("json_schema", make) for name, make in SCHEMAS.items()},
    **{f"regex: {name}": ("regex", make) for name, make in REGEXES.items()},
    **{f"lark: {name}": ("lark", make) for name, make in LARKS.items()},
    "choice": ("choice", names),
}


WORST = (
    "schema: required", "schema: properties", "schema: patternProperties", "schema: const object",
    "schema: anyOf of references", "schema: $ref in line", "regex: options", "regex: dots",
    "lark: rules in line", "lark: rules that may be empty", "lark: ranges",
)  # fmt: skip
"""Without bounds these overflow the stack, or take minutes or gigabytes."""


@pytest.mark.parametrize("case", WORST)
def test_the_worst_constructs_are_not_too_much(case: str) -> None:
    check(case, SIZES[0])


@pytest.mark.soak
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_no_construct_is_too_much(case: str, n: int) -> None:
    check(case, n)


def check(case: str, n: int) -> None:
    """It is refused with a message, or compiled, and then a reply can begin."""
    kind, make = CASES[case]
    given: Any = make(n)
    source = given if isinstance(given, str) else json.dumps(given)
    if kind == "json_schema":
        compiler().relax([given])
    try:
        begun = compiler().compile(Grammar(kind, source)).start()  # type: ignore[arg-type]
    except InvalidValue:
        return
    for _ in range(N_STEPS):
        forced = begun.forced(1)
        mask = begun.matcher.compute_bitmask()
        if begun.matcher.is_stopped() or not any(mask):
            break
        begun.take(forced or [next(i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1)])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a?" * 30_000),
        Grammar("json_schema", json.dumps(SCHEMAS["required"](30_000))),
        Grammar("lark", LARKS["ranges"](30_000)),
    ],
    ids=["states", "names", "one slow token"],
)
def test_what_takes_seconds_or_gigabytes_is_refused(grammar: Grammar) -> None:
    """Which limit is met first depends on the machine."""
    with pytest.raises(InvalidValue):
        compiler().compile(grammar)
    assert compiler().compile(Grammar("regex", "a?")).start().fault is None


def test_what_takes_minutes_is_refused() -> None:
    patterns = Grammar("json_schema", json.dumps(SCHEMAS["patternProperties"](30_000)))
    with pytest.raises(InvalidValue, match=TOO_COSTLY):
        compiler().compile(patterns)
    assert compiler().compile(Grammar("regex", "a?")).start().fault is None


def test_what_is_slow_after_some_tokens_is_charged() -> None:
    """A trial writes few tokens, so a grammar may hide the rest behind a text that is forced."""
    letters = "zqxjkvwb" * 2
    slow = compiler().compile(Grammar("regex", letters + "a?" * 7_000), "hides it")
    begun = slow.start()
    begun.take([tokenizer().encode(letter, add_special=False)[-1] for letter in letters])
    Masks(N_VOCAB).fill([begun])
    assert slow.is_slow
