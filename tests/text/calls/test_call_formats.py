"""What each format allows, beyond the contract that all of them keep."""
# ruff: noqa: E501  (a reply is easier to read on one line)

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from firn.text.calls.call_parser import NativeParser
from firn.text.calls.json_calls import SectionCallParser
from firn.text.calls.parsers import formats
from firn.text.calls.parsers.harmony import HarmonySplitter
from firn.text.calls.python_calls import python_calls
from firn.text.calls.schema import ToolSchemas
from firn.text.reply.formats import THINK_TAGS, ReplyFormat, make_splitter
from firn.text.reply.pieces import TextPiece
from tests.text.replies import TOOLS, Call, Reply, fold, read, read_at_every_split

WEATHER = "get_weather"


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def m3(body: str) -> str:
    """With MiniMax M3's mark before every tag, but not before one in a text."""
    marked = re.sub(r"<(?!b> )", "]<]minimax[>[<", body)
    return f"]<]minimax[>[<tool_call>\n{marked}]<]minimax[>[</tool_call>"


CALLS: dict[str, list[tuple[str, list[tuple[str, Any]]]]] = {
    "json_tags": [
        (tagged('{"name": "other", "arguments": {}}'), [("other", {})]),
        (tagged('{"name": "other"}'), [("other", {})]),
        (tagged('{"name": "other", "arguments": null}'), [("other", {})]),
        (tagged('{"arguments": {"a": 1}, "name": "other"}'), [("other", {"a": 1})]),
        (tagged('{"name": "other", "arguments": "{\\"a\\": 1}"}'), [("other", {"a": 1})]),
        (tagged('{"name": "other", "parameters": {"a": {"b": [1, "}"]}}}'), [("other", {"a": {"b": [1, "}"]}})]),
        (tagged('{"type": "function", "function": {"name": "other", "arguments": {"a": 1}}}'), [("other", {"a": 1})]),
        (tagged('[{"name": "other", "arguments": {"a": 1}}, {"name": "other", "arguments": {}}]'), [("other", {"a": 1}), ("other", {})]),
        (tagged('{"name": "other", "arguments": {"a": 1}}\n{"name": "other", "arguments": {}}'), [("other", {"a": 1}), ("other", {})]),
        (tagged('{"name": "other", "arguments": {"a": 1}}}'), [("other", {"a": 1})]),
        (tagged('{"name": "other", "arguments": {"a": 1},}'), [("other", {"a": 1})]),
        (tagged('{"name": "other", "arguments": {"a": "x\ny\tz"}}'), [("other", {"a": "x\ny\tz"})]),
        (tagged('{"name": "other", "arguments": {"a": "C:\\dir \\d+ \\u00e9 \\\' \\uZ"}}'), [("other", {"a": "C:\\dir \\d+ é ' \\uZ"})]),
        (tagged('{"name": "other", "arguments": {"a": True, "b": None, "c": -1.5e3}}'), [("other", {"a": True, "b": None, "c": -1500.0})]),
        (tagged('{"name": "other", "arguments": {"a": [True, {"b": None, "c": [1e2, false]}], "d": {"True": "None"}}}'), [("other", {"a": [True, {"b": None, "c": [100.0, False]}], "d": {"True": "None"}})]),
        (tagged('{"name": "get_weather", "arguments": {"city": 75, "days": "3", "note": "7"}}'), [(WEATHER, {"city": "75", "days": 3, "note": "7"})]),
        (tagged('{"name": "other", "arguments": {"a": "</tool_call> <think>"}}'), [("other", {"a": "</tool_call> <think>"})]),
        ('<TOOLCALL>[{"name": "other", "arguments": {"a": 1}}]</TOOLCALL>', [("other", {"a": 1})]),
        ('<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "other", "parameters": {"a": 1}}\n]<|END_ACTION|>', [("other", {"a": 1})]),
        ('<tool_call>{"name": "other", "arguments": {"a": 1}}', [("other", {"a": 1})]),
        ('<function_call> {"name": "other", "arguments": {"a": 1}}\n<function_call> {"name": "other", "arguments": {}}', [("other", {"a": 1}), ("other", {})]),
        ('<tool_calls>[{"name": "other", "arguments": {"a": 1}, "id": "c1"}]</tool_calls>', [("other", {"a": 1})]),
    ],
    "json_marks": [
        ('Sure.<|function_call|>{"name": "other", "arguments": {"a": 1}}', [("other", {"a": 1})]),
        ('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "other", "arguments": {"a": 1}}', [("other", {"a": 1})]),
        ('Sure.\n\nfunction call<|role_sep|>\n{"name": "other", "arguments": {}}', [("other", {})]),
        ('functools[{"name": "other", "arguments": {"a": 1}}, {"name": "other", "arguments": {}}]', [("other", {"a": 1}), ("other", {})]),
        ('Action:\n```json\n[\n    {\n        "tool_name": "other",\n        "parameters": {"a": 1}\n    }\n]\n```', [("other", {"a": 1})]),
    ],
    "apertus": [
        ('<|tools_prefix|>[{"other": {"a": 1}}, {"get_weather": {"city": "x", "days": "3"}}]<|tools_suffix|>', [("other", {"a": 1}), (WEATHER, {"city": "x", "days": 3})]),
        ('Sure.<|tools_prefix|>[{"other": {}}', [("other", {})]),
        ('<|tools_prefix|> [ { "other" : { "a" : [1] } } ] <|tools_suffix|>\n', [("other", {"a": [1]})]),
    ],
    "solar": [
        ('<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>other<|tool_call:args|>{"a": 1}<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>other<|tool_call:args|>{}<|tool_call:end|><|calls|>', [("other", {"a": 1}), ("other", {})]),
        ('Sure.<|tool_call:begin|>a1<|tool_call:name|>other<|tool_call:args|>{"a": 1}', [("other", {"a": 1})]),
    ],
    "hy_v3": [
        ("<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>a <b>\n</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>other<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>", [(WEATHER, {"city": "a <b>\n", "days": 3}), ("other", {})]),
        ("Sure.<tool_call>other<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>", [("other", {"a": [1]})]),
    ],
    "json_functions": [
        ('<function=other>{"a": {"b": "</function>"}}</function>\n<function=other>{}</function>', [("other", {"a": {"b": "</function>"}}), ("other", {})]),
        ('Sure.<function=get_weather>{"days": "3"}', [(WEATHER, {"days": 3})]),
    ],
    "functionary": [
        ('other\n{"a": ">>>other\\n"}>>>get_weather\n{"days": "3"}', [("other", {"a": ">>>other\n"}), (WEATHER, {"days": 3})]),
        ('all\nSure.>>>other\n{"a": 1}', [("other", {"a": 1})]),
    ],
    "muse": [
        (' to=other.other<|message|><atem:function_calls>\n<atem:invoke name="other.other">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>', [("other", {"a": 1})]),
        (' to=self<|message|>Hm. to=get_weather.get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather.get_weather">\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>', [(WEATHER, {"days": 3})]),
        (' to=a.a<|message|><atem:function_calls>\n<atem:invoke name="a.a">\n</atem:invoke>\n</atem:function_calls><|eot|>', [("a.a", {})]),
        (' to=other<|message|><atem:function_calls>\n<atem:invoke name="other">\n</atem:invoke>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">a "b"\n</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>', [("other", {}), (WEATHER, {"city": 'a "b"\n', "days": 3})]),
        (' to=user<|message|>Sure.<|eom|><|start|>assistant to=a.b<|message|>\n<atem:function_calls><atem:invoke name="a.b"><atem:parameter name="a">[1]</atem:parameter>', [("a.b", {"a": [1]})]),
        (' to=other<|message|><atem:function_calls>\n<atem:invoke name="other">\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=other<|message|><atem:function_calls>\n<atem:invoke name="other">\n</atem:invoke>\n</atem:function_calls><|eom|>', [("other", {}), ("other", {})]),
    ],
    "minimax_m3": [
        (m3('<invoke name="get_weather"><city>a <b> "c"</city><days>3</days><tags><item>x</item><item>y</item></tags><where><x>1</x><y><item>a</item></y></where><exact>true</exact></invoke>'), [(WEATHER, {"city": 'a <b> "c"', "days": 3, "tags": ["x", "y"], "where": {"x": 1, "y": ["a"]}, "exact": True})]),
        (m3('<invoke name="other"><a>{"b": [1]}</a><b><item><c>1</c></item><item><c>x</c></item></b></invoke>\n<invoke name="other"></invoke>\n'), [("other", {"a": {"b": [1]}, "b": [{"c": 1}, {"c": "x"}]}), ("other", {})]),
        ("Sure." + m3('<invoke name="get_weather"><city>Paris</city></invoke>').removesuffix("]<]minimax[>[</tool_call>"), [(WEATHER, {"city": "Paris"})]),
    ],
    "bare_json": [
        ('{"name": "other", "parameters": {"a": 1}}; {"name": "other", "parameters": {}}', [("other", {"a": 1}), ("other", {})]),
        ('[{"name": "other", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]', [("other", {"a": 1}), (WEATHER, {})]),
        ('\n {"type": "function", "name": "other", "parameters": {}}', [("other", {})]),
    ],
    "python_tag": [
        ('<|python_tag|>other.call(a="x", b=[1, true])', [("other", {"a": "x", "b": [1, True]})]),
        ('{"name": "other", "parameters": {"a": 1}}', [("other", {"a": 1})]),
        ('Sure.<|python_tag|>{"name": "other", "parameters": {}}', [("other", {})]),
    ],
    "xml_functions": [
        ("<tool_call>\n<function=other>\n</function>\n</tool_call>", [("other", {})]),
        ("<function=get_weather>\n<parameter=city>\nA\n\nB\n</parameter>\n</function>", [(WEATHER, {"city": "A\n\nB"})]),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\n007\n</parameter>\n<parameter=days>\n007\n</parameter>\n<parameter=where>\n{\"x\": 1}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>", [(WEATHER, {"city": "007", "days": 7, "where": {"x": 1}, "exact": True, "note": None})]),
        ('<tool_call>\n<function=get_weather>\n<parameter=city>\na "b" \\ <c>\td\n</parameter>\n</function>\n</tool_call>', [(WEATHER, {"city": 'a "b" \\ <c>\td'})]),
        ("<tool_call>\n<function=other>\n<parameter=a>\n1\n</parameter>\n</function>\n<function=other>\n</function>\n</tool_call>", [("other", {"a": 1}), ("other", {})]),
        ('<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>', [("other", {"a": 1})]),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n", [(WEATHER, {"city": "Paris"})]),
        ("<seed:tool_call>\n<function=other>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>", [("other", {"a": 1})]),
    ],
    "named_functions": [
        ('<function name="get_weather"><param name="days">\n3\n</param></function>', [(WEATHER, {"days": 3})]),
        ('<function name="get_weather"><param name="city"><![CDATA[a < b\n]]></param></function>', [(WEATHER, {"city": "a < b\n"})]),
        ('<function name="other"><param name="x"><![CDATA[<1>]]></param></function><function name="other"></function>', [("other", {"x": "<1>"}), ("other", {})]),
    ],
    "glm": [
        ("<tool_call>other</tool_call>", [("other", {})]),
        ("<tool_call>other\n</tool_call>", [("other", {})]),
        ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>007\n</arg_value><arg_key>days</arg_key><arg_value>7</arg_value></tool_call>", [(WEATHER, {"city": "007\n", "days": 7})]),
        ("<longcat_tool_call>other\n<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>[1]</longcat_arg_value>\n</longcat_tool_call>", [("other", {"a": [1]})]),
        (tagged('{"name": "other", "arguments": {"a": 1}}'), [("other", {"a": 1})]),
    ],
    "minimax": [
        ('<minimax:tool_call>\n<invoke name="other">\n</invoke>\n<invoke name="get_weather">\n<parameter name="city">x\n</parameter>\n</invoke>\n</minimax:tool_call>', [("other", {}), (WEATHER, {"city": "x\n"})]),
    ],
    "dsml": [
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="other">\n<｜DSML｜parameter name="a" string="true">7</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', [("other", {"a": "7", "b": 7})]),
        ('<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days" string="true">7</｜DSML｜parameter><｜DSML｜parameter name="note" string="true">7</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>', [(WEATHER, {"days": 7, "note": "7"})]),
        ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="note" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', [(WEATHER, {"note": 7})]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "other", "arguments": {"a": 1}, "id": "abcdef123"}]', [("other", {"a": 1})]),
        ('[TOOL_CALLS] [{"name": "other", "arguments": {}}, {"name": "other", "arguments": {"a": 1}}]', [("other", {}), ("other", {"a": 1})]),
        ('[TOOL_CALLS]other[ARGS]{"a": 1}[TOOL_CALLS]other[ARGS]{}', [("other", {"a": 1}), ("other", {})]),
        ('[TOOL_CALLS]other{"a": 1}', [("other", {"a": 1})]),
    ],
    "deepseek": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [("other", {"a": 1}), ("other", {})]),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [("other", {"a": 1}), ("other", {})]),
    ],
    "kimi_k2": [
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.other:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>other<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>', [("other", {"a": 1}), ("other", {})]),
    ],
    "gemma4": [
        ('<|tool_call>call:get_weather{city:<|"|>a, "b" {c}<|"|>,where:{x:[1,<|"|>y<|"|>,true],<|"|>z<|"|>:None},tags:[]}<tool_call|>', [(WEATHER, {"city": 'a, "b" {c}', "where": {"x": [1, "y", True], "z": None}, "tags": []})]),
        ("<|tool_call>call:get_weather{city:007,days:<|\"|>3<|\"|>}<tool_call|>", [(WEATHER, {"city": "007", "days": 3})]),
        ("<|tool_call>call:other{}<tool_call|><|tool_call>call:other{a:1}<tool_call|>", [("other", {}), ("other", {"a": 1})]),
    ],
    "function_gemma": [
        ("<start_function_call>call:other{a:<escape>x{y}<escape>}<end_function_call>", [("other", {"a": "x{y}"})]),
    ],
    "pythonic": [
        ("<|tool_call_start|>[other(a='it''s'), get_weather(city='Rome', days=\"2\")]<|tool_call_end|>", [("other", {"a": "its"}), (WEATHER, {"city": "Rome", "days": 2})]),
        ("<|tool_call_start|>[other(a='it's a\nline', b={\"x\": null})]<|tool_call_end|>", [("other", {"a": "it's a\nline", "b": {"x": None}})]),
        ("<|tool_call_start|>[other(a='C:\\users\\new', b='\\d+ \\x41 \\\\ \\U0001f642')]<|tool_call_end|>", [("other", {"a": "C:\\users\new", "b": "\\d+ A \\ 🙂"})]),
        ("<|tool_call_start|>[get_weather(city=007, days=007), other(a=007, b={'x': 07})]<|tool_call_end|>", [(WEATHER, {"city": "007", "days": 7}), ("other", {"a": "007", "b": {"x": "07"}})]),
        ("<|tool_call_start|>[other(a=2024-10-05, b=[5kg, -3], c=10:30, d='it's 07')]<|tool_call_end|>", [("other", {"a": "2024-10-05", "b": ["5kg", -3], "c": "10:30", "d": "it's 07"})]),
        ("<|tool_call_start|>[other(a={1, 2}, b=[{'x'}], c='y\0' '1')]<|tool_call_end|>", [("other", {"a": [1, 2], "b": [["x"]], "c": "y\0001"})]),
        ("<function_calls>\nother(a=1)\nother(b=[1, 2])\n</function_calls>", [("other", {"a": 1}), ("other", {"b": [1, 2]})]),
        ("<|tool_call_start|>[get_weather(city=Paris, exact=true), other(a=[x, null])]<|tool_call_end|>", [(WEATHER, {"city": "Paris", "exact": True}), ("other", {"a": ["x", None]})]),
        ('<|tool_call_start|>[{"name": "get_weather", "arguments": {"days": "3"}}, {"name": "other"}]<|tool_call_end|>', [(WEATHER, {"days": 3}), ("other", {})]),
        ('Sure.<|tool_call_start|>{"name": "other", "parameters": {"a": 1}}', [("other", {"a": 1})]),
    ],
    "llama4_pythonic": [
        ("Sure. <|python_start|>[other(a=[1, 2]), get_weather(city=Paris)]<|python_end|>", [("other", {"a": [1, 2]}), (WEATHER, {"city": "Paris"})]),
        ("<|python_start|>[other(a=1)]", [("other", {"a": 1})]),
        ("[other(a='[x]')]", [("other", {"a": "[x]"})]),
    ],
    "pythonic_bare": [
        ("[get_weather(city='[x]', days=1), other()]", [(WEATHER, {"city": "[x]", "days": 1}), ("other", {})]),
        ("[get_weather(days=03)]", [(WEATHER, {"days": 3})]),
        ("[other(a='it's [a] ]', b=[[1], [2]])]", [("other", {"a": "it's [a] ]", "b": [[1], [2]]})]),
        ("[other(a='it''s [', b='\\']')]", [("other", {"a": "its [", "b": "']"})]),
        ('[other(a="""x] "y" """)]', [("other", {"a": 'x] "y" '})]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [(f, text, calls) for f, cases in CALLS.items() for text, calls in cases],
)
def test_every_variant_of_a_call_is_read(
    format: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    reply = read_at_every_split(ReplyFormat(tool=format), text, was_cut=False)
    assert [(c.name, c.arguments) for c in reply.calls] == calls
    assert reply.text == ("Sure." if "Sure." in text else "")


TEXTS: dict[str, list[str]] = {
    "json_tags": [
        "<tool_call>no json</tool_call>",
        tagged("[]"),
        tagged("{}"),
        tagged('{"name": 5, "arguments": {}}'),
        tagged('{"name": "two words", "arguments": {}}'),
        tagged('{"name": "other", "arguments": [1]}'),
        tagged('{"name": "other" "arguments": {}}'),
        tagged('{"arguments": {"a": [NaN]}, "name": "other"}'),
        tagged('{"name": "other", "arguments": "{\\"a\\": 1e999}"}'),
        "<tool_call",
        "a <tool_call> is a tag, and <tool_response> too",
    ],
    "bare_json": [
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        '{"name": "other", "age": 3}',
        '{"name": "nobody", "parameters": {}}',
        '[1] is a footnote',
        "{not json}",
        'Text first: {"name": "other", "parameters": {}}',
        '{"name": "other"',
    ],
    "python_tag": ["<|python_tag|>print(1)", "<|python_tag|>unknown.call(a=1)", "<|python_tag|>other.call(a=b'x')"],
    "xml_functions": ["<tool_call>\nhello\n</tool_call>", "<function=two words>x</function>"],
    "glm": ["<tool_call> is a tag\nof two lines", "<tool_call>" + "x" * 2000],
    "mistral": ["[TOOL_CALLS] is a marker", '[TOOL_CALLS][{"name": "other", "arguments": [}]'],
    "deepseek": ["<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_calls_section_end|>"],
    "gemma4": ["<|tool_call>hello<tool_call|>"],
    "pythonic": [
        "<|tool_call_start|>[1, 2]<|tool_call_end|>",
        "<|tool_call_start|>[other(1)]<|tool_call_end|>",
        "<|tool_call_start|>[other(**x)]<|tool_call_end|>",
        "<|tool_call_start|>import os<|tool_call_end|>",
        "<|tool_call_start|>[other(), other(a=b'x')]<|tool_call_end|>",
        "<|tool_call_start|>[other(a={(1, 2): 3})]<|tool_call_end|>",
        "<|tool_call_start|>[other(a=...)]<|tool_call_end|>",
        "<|tool_call_start|>[other(a=1e999)]<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "other", "arguments": 1}]<|tool_call_end|>',
        '<|tool_call_start|>[{"arguments": {}}]<|tool_call_end|>',
    ],
    "llama4_pythonic": ["<|python_start|>print(1)<|python_end|>", "[unknown(a=1)]", "<|python_start|>[unknown(a=1)]<|python_end|>"],
    "pythonic_bare": ["[1] see (below)]", "[unknown(a=1)]", "[get_weather(a="],
    "apertus": ["<|tools_prefix|>[1]<|tools_suffix|>", '<|tools_prefix|>[{"other": 1}]<|tools_suffix|>', '<|tools_prefix|>{"other": {}}'],
    "solar": ["<|tool_calls|>nothing<|calls|>"],
    "json_functions": ["<function=two words>{}</function>"],
    "minimax_m3": ["]<]minimax[>[<tool_call> is a tag", "a ]<]minimax[>[ b"],
    "whole_call": ['<call>{"name": "other", "arguments": {"a": 1e999}}</call>', "<call>no</call>", "<call>[1]</call>", '<call>{"name": "other", "arguments": 1}</call>'],
}  # fmt: skip
NATIVE = NativeParser("fake", "<call>", "</call>", lambda text, tools: json.loads(text))


BROKEN: dict[str, tuple[str, str]] = {
    "deepseek": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{"a": 1, ?}<｜tool▁call▁end｜>',
        '<｜tool▁call▁begin｜>other<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>other<|tool_call_argument_begin|>"
        '{"a": 1, ?}<|tool_call_end|>',
        '<|tool_call_begin|>other<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
}
"""Two calls of one section. The first is not JSON; what could be read of it stays."""


@pytest.mark.parametrize("format", BROKEN)
def test_a_broken_call_takes_no_good_one_along(format: str) -> None:
    reply = read_at_every_split(ReplyFormat(tool=format), "".join(BROKEN[format]))
    assert [(c.name, c.text) for c in reply.calls] == [("other", '{"a": 1}'), ("other", '{"a": 1}')]
    assert reply.text == ""


@pytest.mark.parametrize(
    ("format", "text"), [(f, text) for f, cases in TEXTS.items() for text in cases]
)
def test_what_is_not_a_call_is_text(format: str, text: str) -> None:
    reply = read_at_every_split(ReplyFormat(tool=format, native=NATIVE), text)
    assert reply.calls == []
    assert reply.text == text


@pytest.mark.parametrize("format", ["deepseek", "kimi_k2", "solar"])
def test_noise_in_a_section_is_no_text(format: str) -> None:
    parser = formats()[format].parser
    assert issubclass(parser, SectionCallParser)
    example = formats()[format].example
    call = example.removeprefix(parser.section).removesuffix(parser.section_end)
    section = f"{parser.section}\nFirst:{call}, then {call} done{parser.section_end}after"
    reply = read_at_every_split(ReplyFormat(tool=format), section)
    assert ([c.name for c in reply.calls], reply.text) == ([WEATHER, WEATHER], "after")
    open_end = read_at_every_split(ReplyFormat(tool=format), f"{parser.section}{call}So I wait")
    assert (len(open_end.calls), open_end.text) == (1, "So I wait")
    long = read(ReplyFormat(tool=format), [f"{parser.section}{call}", "So " * 900])
    assert (len(long.calls), long.text) == (1, "So " * 900)


@pytest.mark.parametrize("format", ["json_tags", "xml_functions", "glm", "minimax"])
def test_a_marker_that_was_cut_off_after_a_call_is_no_text(format: str) -> None:
    form = formats()[format]
    for n in range(1, len(form.opens[0])):
        text = f"{form.example}\n{form.opens[0][:n]}"
        reply = read_at_every_split(ReplyFormat(tool=format), text)
        assert (len(reply.calls), reply.text) == (1, "")
        assert read(ReplyFormat(tool=format), [f"{form.example} a <"]).text == "a <"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("xml_functions", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>"),
        ("xml_functions", "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n<parameter=city>\nParis\n</function>\n</tool_call>"),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris<parameter name="days">3</invoke></minimax:tool_call>'),
        ("minimax_m3", m3('<invoke name="get_weather"><city>Paris<days>3</days></invoke>')),
        ("dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">Paris<｜DSML｜parameter name="days" string="true">3</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'),
    ],
)  # fmt: skip
def test_a_value_without_its_closing_tag_ends_at_the_next_parameter(format: str, text: str) -> None:
    reply = read_at_every_split(ReplyFormat(tool=format), text + "after")
    assert [c.arguments for c in reply.calls] == [{"city": "Paris", "days": 3}]
    assert reply.text == "after"


def test_a_value_may_hold_what_begins_no_parameter() -> None:
    value = "<parameter=city>\n<parameter=other> </function> </tool_call>"
    text = f"<function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    (call,) = read_at_every_split(ReplyFormat(tool="xml_functions"), text).calls
    assert call.arguments == {"city": value}


NO_SEPARATOR = {
    "deepseek": ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
}


@pytest.mark.parametrize("format", NO_SEPARATOR)
def test_a_header_without_its_separator_takes_no_good_call_along(format: str) -> None:
    call, separator, end = NO_SEPARATOR[format]
    bad, good = f"{call}other {{}}{end}", f'{call}other{separator}{{"a": 1}}{end}'
    reply = read_at_every_split(ReplyFormat(tool=format), bad + good)
    assert [(c.name, c.text) for c in reply.calls] == [("other", '{"a": 1}')]


def test_deepseek_arguments_that_are_not_an_object_stay_in_their_call() -> None:
    call, separator, end = NO_SEPARATOR["deepseek"]
    text = f'{call}other{separator}[1]{end}{call}other{separator}{{"a": 1}}{end}'
    reply = read_at_every_split(ReplyFormat(tool="deepseek"), text)
    assert [(c.name, c.text) for c in reply.calls] == [("other", "[1]"), ("other", '{"a": 1}')]


def test_a_header_that_is_too_long_is_text() -> None:
    """Shown immediately, so that the reader need not wait for the end of the reply."""
    format, text = ReplyFormat(tool="glm"), "<tool_call>" + "x" * 2000
    splitter = make_splitter(format, TOOLS, "")
    assert splitter is not None
    assert fold(splitter.feed(text)).text == text
    closed = f"{text}\n</tool_call>"
    assert read(format, [closed]) == read(format, list(closed))
    assert read(format, [closed]).text == closed


def test_a_long_call_without_markers_is_read_in_linear_time() -> None:
    # Parsing at every bracket would take minutes here, on the thread that all replies share.
    rows = [[i, i + 1] for i in range(6000)]
    reply = read(ReplyFormat(tool="pythonic_bare"), [f"[other(rows={rows}, note='(:]')] ok"])
    assert reply.calls[0].arguments == {"rows": rows, "note": "(:]"}
    assert reply.text == "ok"


def test_a_good_call_after_a_bad_one() -> None:
    text = tagged("bad") + " " + tagged('{"name": "other", "arguments": {}}')
    reply = read_at_every_split(ReplyFormat(tool="json_tags"), text)
    assert [c.name for c in reply.calls] == ["other"]
    assert reply.text == tagged("bad")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": 1, oops}', '{"a": 1}'),
        ('{"a": 1,}', '{"a": 1}'),
        ('{,"a": 1,, "b": [1, 2,]}', '{"a": 1, "b": [1, 2]}'),
        ('{"a": 1 "b": "x" "c": [1 "2" {}]}', '{"a": 1, "b": "x", "c": [1, "2", {}]}'),
        ("{'a': 'it's', b: [\"x\", 'y'], c : True}", '{"a": "it\'s", "b": ["x", "y"], "c": true}'),
        ('{"a" 1, "b" {"c" "x"}}', '{"a": 1, "b": {"c": "x"}}'),
        (
            '{"a": 2024-10-05, "b": 07, "c": [.5, 3 km], "d": 1}',
            '{"a": "2024-10-05", "b": "07", "c": [".5", "3 km"], "d": 1}',
        ),
        ('{"a": NaN, "b": 1}', '{"a": null}'),
        ('{"a": , "b": 1, "c":}', '{"a": null, "b": 1, "c": null}'),
        ('{"a": {"b": [1, {"c": ?', '{"a": {"b": [1, {"c": null}]}}'),
        ('{"a": [1, 2}, "b": {"c": 3]}', '{"a": [1, 2], "b": {"c": 3}}'),
        ('{"a": [1, 2}', '{"a": [1, 2]}'),
        ('{"a": "x" + "y", "b": 2}', '{"a": "x", "b": 2}'),
        ('{"a": "x', '{"a": "x"}'),
        ('{"a": "x\\', '{"a": "x"}'),
    ],
)
def test_arguments_are_json_whatever_the_model_writes(written: str, arguments: str) -> None:
    for format, before, after in (
        ("json_tags", '<tool_call>{"name": "other", "arguments": ', "}</tool_call>"),
        (
            "solar",
            "<|tool_call:begin|>1<|tool_call:name|>other<|tool_call:args|>",
            "<|tool_call:end|>",
        ),
    ):
        end = "" if written.endswith(("x", "\\", "?", "2}")) else after
        reply = read_at_every_split(ReplyFormat(tool=format), before + written + end, was_cut=False)
        assert [(c.name, c.arguments) for c in reply.calls] == [("other", json.loads(arguments))]
        assert reply.text == ""


def test_brackets_that_a_model_leaves_out() -> None:
    for broken in (
        '<tool_call>{"name": "other", "arguments": {"a": 1}</tool_call>after',
        '<tool_call>{"name": "other", "arguments": {"a": 1</tool_call>after',
        '<tool_calls>[{"name": "other", "arguments": {"a": 1}}</tool_calls>after',
    ):
        reply = read_at_every_split(ReplyFormat(tool="json_tags"), broken)
        assert [(c.name, c.arguments) for c in reply.calls] == [("other", {"a": 1})]
        assert reply.text == "after"


def test_a_value_of_gemmas_notation_that_goes_on_after_its_end() -> None:
    """The arguments end there, as JSON; the rest of the call is left out."""
    broken = (
        "<start_function_call>call:other{a:<escape>b<escape>c<escape>,d:3}<end_function_call>after"
    )
    reply = read_at_every_split(ReplyFormat(tool="function_gemma"), broken)
    assert [(c.name, c.arguments) for c in reply.calls] == [("other", {"a": "b"})]
    assert reply.text == "after"


def test_a_reply_that_is_cut_leaves_its_arguments_cut() -> None:
    """Completed, they could be taken for what the model wanted."""
    for format, text in (
        ("json_tags", '<tool_call>{"name": "other", "arguments": {"path": "/tmp/a'),
        ("xml_functions", "<function=get_weather><parameter=city>Par"),
        ("xml_functions", "<function=get_weather><parameter=city>Paris</parameter>"),
        (
            "glm",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_",
        ),
        ("gemma4", '<|tool_call>call:other{a:[<|"|>x'),
        ("harmony", '<|channel|>commentary to=functions.other<|message|>{"a": [1, '),
    ):
        for was_cut in (True, False):
            (call,) = read_at_every_split(ReplyFormat(tool=format), text, was_cut=was_cut).calls
            if was_cut:
                with pytest.raises(ValueError, match="line 1"):
                    json.loads(call.text)
            else:
                assert isinstance(json.loads(call.text), dict)


HALVES = {
    r"\ud83d\ude00": "\U0001f600",
    r"\uD83D\uDE00 \u00e9": "\U0001f600 \u00e9",
    r"a\ud83d": "a\ufffd",
    r"\ud83d b": "\ufffd b",
    r"\ude00": "\ufffd",
    r"\ude00\ud83d": "\ufffd\ufffd",
    r"\ud83d\ud83d\ude00": "\ufffd\U0001f600",
    r"\ud83d\u0041": "\ufffdA",
    r"\ud83d\n": "\ufffd\n",
    r"\ud83d\u12": "\ufffd\\u12",
}


@pytest.mark.parametrize("format", ["json_tags", "bare_json", "mistral", "harmony"])
@pytest.mark.parametrize("written", HALVES)
def test_half_a_character_is_a_broken_one_in_json(format: str, written: str) -> None:
    """Clients refuse it in arguments, or fail when they send it back."""
    text = formats()[format].example.replace("Paris", written)
    reply = read_at_every_split(ReplyFormat(tool=format), text)
    assert reply.calls[0].arguments == {"city": HALVES[written], "days": 3}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            "xml_functions",
            '<tool_call>\n<function=other>\n<parameter=list>\n["\\ud83d"]\n</parameter>\n'
            "</function>\n</tool_call>",
        ),
        ("pythonic", r"<|tool_call_start|>[other(list=['\ud83d'])]<|tool_call_end|>"),
        ("json_tags", r'<tool_call>{"name": "other", "arguments": "{\"list\": [\"\\ud83d\"]}"}'),
    ],
)
def test_half_a_character_is_a_broken_one_in_other_values(format: str, text: str) -> None:
    (call,) = read_at_every_split(ReplyFormat(tool=format), text).calls
    assert call.arguments == {"list": ["\ufffd"]}


def test_ids_of_the_model_are_kept() -> None:
    kimi = read(ReplyFormat(tool="kimi_k2"), [CALLS["kimi_k2"][0][0]])
    assert [c.id for c in kimi.calls] == ["functions.other:3", "other"]
    mistral = '[TOOL_CALLS]other[CALL_ID]abcdef123[ARGS]{"a": 1}'
    assert read(ReplyFormat(tool="mistral"), [mistral]).calls[0].id == "abcdef123"


def test_a_string_parameter_streams() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + "long text " * 20
    reply = read(ReplyFormat(tool="xml_functions"), list(text))
    assert reply.calls[0].text == '{"city": "' + "long text " * 20
    assert reply.n_pieces > 200


def test_the_native_parser_sees_the_tools_and_may_fail_in_any_way() -> None:
    seen: list[Any] = []

    def parse(text: str, tools: Any) -> Any:
        seen.append(tools)
        raise KeyError(text)

    native = NativeParser("fake", "<call>", "</call>", parse)
    reply = read(ReplyFormat(tool="whole_call", native=native), ["<call>x</call>"])
    assert reply.text == "<call>x</call>"
    assert seen[0][0]["function"]["name"] == "get_weather"


def test_a_native_format_without_an_end_runs_to_the_end_of_the_reply() -> None:
    native = NativeParser("fake", "<call>", "", lambda text, tools: json.loads(text))
    text = '<call>[{"name": "get_weather", "arguments": {"days": "3"}, "id": "x"}]'
    reply = read_at_every_split(ReplyFormat(tool="whole_call", native=native), text)
    assert reply.calls == [Call("get_weather", '{"days": 3}', "x")]


# --- harmony --------------------------------------------------------------------------------

HARMONY = ReplyFormat(tool="harmony")
CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"


def test_harmony_channels_become_reasoning_text_and_calls() -> None:
    text = (
        f"{CHANNEL}analysis{MESSAGE}I think.{END}"
        f"{START}assistant{CHANNEL}commentary{MESSAGE}Let me look.{END}"
        f"{START}assistant{CHANNEL}commentary to=functions.other <|constrain|>json{MESSAGE}"
        '{"a": "<|x|>"}<|call|>'
        f"{START}assistant to=functions.get_weather{CHANNEL}commentary json{MESSAGE}"
        '{"days": "3"}<|call|>'
        f"{START}assistant{CHANNEL}final{MESSAGE}Done <b>.<|return|>"
    )
    reply = read_at_every_split(HARMONY, text, tail="<|start|>assistant")
    assert reply.reasoning == "I think."
    assert reply.text == "Let me look.Done <b>."
    assert [(c.name, c.arguments) for c in reply.calls] == [
        ("other", {"a": "<|x|>"}),
        ("get_weather", {"days": 3}),
    ]


@pytest.mark.parametrize(
    ("text", "tail", "text_out", "reasoning"),
    [
        (f"{CHANNEL}analysis{MESSAGE}cut sho", "", "", "cut sho"),
        (f"{CHANNEL}anal", "", "", ""),
        ("no header at all", "", "no header at all", ""),
        ("to", "", "to", ""),
        ("x" * 3000, "", "x" * 3000, ""),
        ("ok<|return|>", f"{START}assistant{CHANNEL}final{MESSAGE}", "ok", ""),
        ("hm<|end|>", f"{START}assistant{CHANNEL}analysis{MESSAGE}", "", "hm"),
        (f"{CHANNEL}analysis{MESSAGE}hm{CHANNEL}final{MESSAGE}ok", "", "ok", "hm"),
        (f"{CHANNEL}analysis to=python{MESSAGE}print(1){END}", "", "", "print(1)"),
        ("<|constrain|>" + "x" * 3000 + f"{MESSAGE}y", "", "<|constrain|>" + "x" * 3000 + f"{MESSAGE}y", ""),
    ],
)  # fmt: skip
def test_harmony_at_the_edges(text: str, tail: str, text_out: str, reasoning: str) -> None:
    reply = read(HARMONY, [text], tail=tail)
    assert read(HARMONY, list(text), tail=tail) == reply
    assert (reply.text, reply.reasoning, reply.calls) == (text_out, reasoning, [])


@pytest.mark.parametrize("marker", ["<|channel|>", "<|start|>", " <|channel|>", "to=", "<|end|>"])
def test_a_harmony_header_without_end_is_text(marker: str) -> None:
    """Giving up at the same marker forever would hang the server."""
    long = f"{marker}analysis{' x' * 1000}"
    reply = read(ReplyFormat(tool="harmony"), [long])
    assert reply.text == long.removeprefix("<|end|>")
    assert read(ReplyFormat(tool="harmony"), list(long)) == reply
    then = f"{long}<|end|><|start|>assistant<|channel|>final<|message|>so"
    assert read(ReplyFormat(tool="harmony"), [then]).text == f"{reply.text}so"


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_text_of_harmony_is_placed_where_it_was_said(n: int) -> None:
    """Text that might begin a marker is held back for a while."""
    reply = "<|channel|>final<|message|>a < b <| c <|en d<|end|>"
    splitter = HarmonySplitter(ToolSchemas(), "")
    pieces = [p for i in range(0, len(reply), n) for p in splitter.feed(reply[i : i + n])]
    texts = [p for p in [*pieces, *splitter.finish()] if isinstance(p, TextPiece)]
    assert "".join(p.text for p in texts) == "a < b <| c <|en d"
    assert all(reply[p.at :].startswith(p.text) for p in texts)
    assert [p.at for p in texts] == sorted({p.at for p in texts})


def test_harmony_calls_a_tool_by_its_bare_name() -> None:
    for name, is_call in (("other", True), ("nobody", False)):
        text = f'{CHANNEL}commentary to={name}{MESSAGE}{{"a": 1}}<|call|>'
        reply = read_at_every_split(HARMONY, text)
        assert (len(reply.calls) == 1, reply.text == "") == (is_call, is_call)


def test_harmony_without_tools_gives_the_body_of_a_call_as_text() -> None:
    text = f"{CHANNEL}commentary to=functions.other{MESSAGE}{{}}<|call|>"
    assert read(HARMONY, [text], tools=()) == Reply(text="{}", order=["TextPiece"])


@pytest.mark.parametrize(
    ("body", "arguments"), [("", "{}"), ("print(1)", "print(1)"), ("[1]", "[1]")]
)
def test_harmony_arguments_of_any_kind(body: str, arguments: str) -> None:
    text = f"{CHANNEL}commentary to=functions.other{MESSAGE}{body}<|call|>"
    reply = read_at_every_split(HARMONY, text)
    assert reply.calls == [Call("other", arguments)]


# --- other formats that shape the whole reply -------------------------------------------------

MUSE, FUNCTIONARY = ReplyFormat(tool="muse"), ReplyFormat(tool="functionary")
INVOKE = '<atem:function_calls>\n<atem:invoke name="other">\n</atem:invoke>\n</atem:function_calls>'


def test_messages_of_muse_become_reasoning_text_and_calls() -> None:
    text = (
        f" to=self<|message|>I could write {INVOKE}<|eom|><|start|>assistant to=other<|message|>{INVOKE}"
        f"<|eom|><|start|>assistant to=user<|message|>I wrote {INVOKE}.<|eot|>"
    )
    reply = read_at_every_split(MUSE, text, tail="<|start|>assistant")
    assert [(c.name, c.arguments) for c in reply.calls] == [("other", {})]
    assert (reply.reasoning, reply.text) == (f"I could write {INVOKE}", f"I wrote {INVOKE}.")


@pytest.mark.parametrize(
    ("text", "said", "reasoning", "n_calls"),
    [
        (f" to=self<|message|>hm to=other<|message|>{INVOKE}", "", "hm", 1),
        (" to=self<|message|>hm<|eom|>", "", "hm", 0),
        (" to=self<|message|>a to=b c", "", "a to=b c", 0),
        ("<|message|>yes<|eot|>", "yes", "", 0),
        ("no header", "no header", "", 0),
        (" to=other<|message|>no call<|eot|>", "no call", "", 0),
        (f" to=other<|message|>{INVOKE} and more<|eot|>", " and more", "", 1),
        (" to=us", " to=us", "", 0),
        ("<|start|>assistant to=us", "", "", 0),
    ],
)
def test_muse_at_the_edges(text: str, said: str, reasoning: str, n_calls: int) -> None:
    reply = read_at_every_split(MUSE, text)
    assert (reply.text, reply.reasoning, len(reply.calls)) == (said, reasoning, n_calls)


@pytest.mark.parametrize(
    ("text", "said", "n_calls"),
    [
        ("all\nHello >>> 1\n", "Hello >>> 1\n", 0),
        ("all\nHello>>>other\n{}", "Hello", 1),
        ("other\n{}>>>all\nDone", "Done", 1),
        ("Hello", "Hello", 0),
        ("unknown\n{}", "unknown\n{}", 0),
        ("other\nno json", "other\nno json", 0),
        ("al", "al", 0),
    ],
)
def test_recipients_of_functionary(text: str, said: str, n_calls: int) -> None:
    reply = read_at_every_split(FUNCTIONARY, text, tail="<|end_header_id|>\n\n>>>")
    assert (reply.text, len(reply.calls)) == (said, n_calls)
    assert read(FUNCTIONARY, list("all\nHello"), tools=()).text == "Hello"


def test_solar_and_apertus_reason_in_tags_of_their_own() -> None:
    solar = ReplyFormat(tool="solar", think=THINK_TAGS["solar"])
    call = formats()["solar"].example
    text = f"<|think|>hm<|end|><|begin|>assistant{call}"
    reply = read_at_every_split(solar, text, tail="<|begin|>assistant")
    assert (reply.reasoning, reply.text, len(reply.calls)) == ("hm", "", 1)
    reply = read_at_every_split(solar, "<|think|>hm<|end|><|begin|>assistant<|content|>yes<|end|>")
    assert (reply.reasoning, reply.text) == ("hm", "yes")
    apertus = ReplyFormat(tool="apertus", think=THINK_TAGS["apertus"])
    reply = read_at_every_split(apertus, "<|inner_prefix|>hm<|inner_suffix|>yes")
    assert (reply.reasoning, reply.text) == ("hm", "yes")


def test_minimax_m3_nested_to_no_end_ends_the_call() -> None:
    text = m3('<invoke name="other">' + "<a>" * 5000)
    reply = read(ReplyFormat(tool="minimax_m3"), [text])
    assert [c.name for c in reply.calls] == ["other"]


# --- Python ---------------------------------------------------------------------------------


def test_python_is_parsed_and_never_run() -> None:
    assert python_calls("f(a=__import__('os'))") == []
    assert python_calls("f(a=1) + g()") == []
    assert python_calls("a.b.c(x=-1)") == [("a.b.c", {"x": -1})]
    assert python_calls("(" * 10_000) == []


@pytest.mark.parametrize("piece", ["1", "1-", "1:11", "07,", "'07", "-"])
def test_what_looks_like_numbers_is_read_in_linear_time(piece: str) -> None:
    assert python_calls(f"f(a={piece * 100_000}") == []
