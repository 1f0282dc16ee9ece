"""Grammars of free-form tools inside JSON strings accept the same texts, in JSON's escaping."""

from __future__ import annotations

import json

import pytest

from firn.core.values import Grammar
from firn.text.grammar.json_lark import UnsupportedGrammar, for_json_string
from firn.text.grammar.regex_tree import RegexChar as Char
from firn.text.grammar.regex_tree import RegexClass as Class
from firn.text.grammar.regex_tree import RegexGroup as Group
from firn.text.grammar.regex_tree import RegexItem as Item
from firn.text.grammar.regex_tree import UnsupportedRegex, parse
from tests.text.grammar_walks import compiler, tokenizer

PATCH = r"""
start: begin change+ end
begin: "*** Begin" LF  // what a patch begins with
end: "*** End" LF?
change: head line+
head: "*** File: " NAME LF -> head
line: ("+" | "-" | " ") /(.*)/ LF
NAME: /[^\n"]+/
%import common.LF
"""


def accepts(grammar: str, text: str) -> bool:
    vocabulary = tokenizer("json_tags")
    begun = compiler("json_tags").compile(Grammar("lark", grammar, "format")).start()
    for token in vocabulary.encode(text, add_special=False):
        if begun.matcher.is_stopped() or not begun.matcher.consume_token(token):
            return False
    return begun.matcher.is_accepting()


CASES = {
    "a patch": (
        PATCH,
        [
            '*** Begin\n*** File: a.py\n+x = "1\\n"\n- \t\\\n*** End\n',
            "*** Begin\n*** File: a\n+\n*** End",
        ],
        ["*** Begin\n*** End\n", '*** Begin\n*** File: "\n+\n*** End\n', "", "*** Begin"],
    ),
    "literals": ('start: "a\\"b\\\\" "\\n\\t/" "x"i', ['a"b\\\n\t/X', 'a"b\\\n\t/x'], ["a", 'a"b']),
    "a range": ('start: "a".."c"+', ["abc"], ["abd", ""]),
    "a range with spaces": ('start: ("!" .. "~")+', ['a"b', "\\"], ["\n", "a b", ""]),
    "odd range": ('start: (" ".."0")+', ['"! 0'], ["1"]),
    "classes": (r"start: /[\s\w]{2}\d/", ["\na1", "ab2"], ["a1", "-a1"]),
    "any line": ("start: /a.b/s", ["a\nb", 'a"b'], ["a\n", "ab"]),
    "optional": (r'start: /a\r?\n/ "b"', ["a\r\nb", "a\nb"], ["ab", "a\rb"]),
    "many breaks": (
        'start: "a" NEWLINE "\\"b\\""\n%import common.NEWLINE',
        ['a\n\r\n"b"'],
        ['a"b"'],
    ),
    "a list of imports": (
        "start: WORD WS INT\n%import common (WORD, WS, INT)",
        ["ab \t\n12"],
        ["ab12"],
    ),
    "alternatives": (r'start: /(?:"|\\|x){2}y?/', ['"\\y', "xx", '""'], ['"', "xyx"]),
    "a name for it": (r'start: T "z"' + '\nT: U /b*/\nU: /"+/', ['""bbz', '"z'], ["z", "bz"]),
    "nothing special": ("start: /[a-z]+/ DIGIT\n%import common.DIGIT", ["abc1"], ["1", "abc"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_quoted_grammar_accepts_the_same_texts(case: str) -> None:
    grammar, right, wrong = CASES[case]
    inside = for_json_string(grammar)
    for text in right:
        assert accepts(grammar, text), text
        assert accepts(inside, json.dumps(text, ensure_ascii=False)[1:-1]), text
    for text in wrong:
        assert not accepts(inside, json.dumps(text, ensure_ascii=False)[1:-1]), text


@pytest.mark.parametrize("raw", ['a"', '"x', "a\n", "\\"])
def test_no_text_ends_the_string(raw: str) -> None:
    assert not accepts(for_json_string("start: /(?s:.*)/"), raw)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /a/ & ~/b/",
        'start: %json {"type": "string"}',
        "start: <[12]>",
        "start: @other",
        r"start: /(?=a)b/",
        r"start: /(a)\1/",
        "start: /^a$/",
        'start: /[a"]/i',
        'start: "a\\n"i',
        "start: /a/x",
        "%import other.THING\nstart: THING",
        "start: A\n%ignore WS\n%import common.WS\nA: /a/",
        'start: "abc".."z"',
        'start: "a"..',
        'start: "a".. B',
        "start: /[/",
    ],
)
def test_a_grammar_without_a_form_inside_json_is_refused(grammar: str) -> None:
    with pytest.raises(UnsupportedGrammar):
        for_json_string(grammar)


# --- regular expressions -------------------------------------------------------------------


def test_regular_expressions_are_parsed() -> None:
    assert parse(r"a\n[b\]]*|(?:c.){2,}") == Group(
        (
            (
                Item(Char("a")),
                Item(Char("\n")),
                Item(Class(r"[b\]]"), "*"),
            ),
            (
                Item(
                    Group(((Item(Char("c")), Item(Class(r"[^\n]"))),)),
                    "{2,}",
                ),
            ),
        )
    )
    assert parse("a+?") == Group(((Item(Char("a"), "+"),),))
    assert parse(r"\x41\u{42}\u0043") == Group(((*(Item(Char(c)) for c in "ABC"),),))
    assert parse("(?s:.)(?P<n>x)(?i:y)").options[0][2].atom == Group(((Item(Char("y")),),), True)
    assert parse(r"\p{L}\d[[a-c]&&[^b]]").options[0][2].atom == Class("[[a-c]&&[^b]]")


@pytest.mark.parametrize(
    "pattern", ["(", ")", "[a", "*a", "a|*", r"\b", r"\1", "(?!a)", r"\xzz", "^"]
)
def test_unsupported_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedRegex):
        parse(pattern)
