"""Guarded templates render as before, and none of them renders forever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils import chat_template_utils

from firn.core.errors import TemplateFailed
from firn.models.tokenizer import template_guard
from firn.models.tokenizer.template_guard import RenderTooSlow, guard
from tests.models.tokenizer.test_hf_tokenizer import write_tokenizer
from tests.zoo import folder as zoo_folder

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <b>there</b>"},
    {"role": "assistant", "content": "Hi", "tool_calls": [{"name": "f", "arguments": {"a": [1]}}]},
]
TEMPLATES = {
    "loop": "{% for m in messages %}{{ loop.index }}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "else": "{% for m in [] %}x{% else %}none{% endfor %}",
    "filtered": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "recursive": "{% for x in [[1, [2]], [3]] recursive %}"
    "{{ loop(x) if x is iterable else x }}{% endfor %}",
    "macro": "{% macro m(x, y=2) %}{% for i in range(y) %}{{ x }}{% endfor %}{{ caller() if caller }}"
    "{% endmacro %}{{ m('a') }}{% call m('b', 3) %}c{% endcall %}",
    "first macro line": "{% macro m() -%}\n  {{ varargs | length }}\n{%- endmacro %}{{ m(1, 2) }}",
    "break": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n * 2 }} {{ 2 ** 10 }} {{ '-' * 5 }} {{ [1] * 2 }}",
    "do": "{{ messages | tojson }}{{ tools }}{{ add_generation_prompt }}",
    "block": "{% block a %}{% for m in messages %}{{ m.role }}{% endfor %}{% endblock %}",
    "set block": "{% set x %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ x | upper }}",
    "ticks": "{{ firn_tick }}{% set tick = 5 %}{{ tick }}",
}


def render(source: str, **variables: Any) -> str:
    rendered, _ = chat_template_utils.render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **variables
    )
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_guarded_template_renders_as_before(name: str) -> None:
    source = TEMPLATES[name] + "{# of its own #}"
    before = render(source)
    guard(source)
    guard(source)
    assert render(source) == before
    assert render(source) == before


# --- the bound -----------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"inner": value}
    return value


ENDLESS = {
    "loops": (
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        {},
    ),
    "loops that write": (
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        {},
    ),
    "a macro that branches": (
        "{% macro m(d) %}{% if d %}{{ m(d.inner) }}{{ m(d.inner) }}{% endif %}{% endmacro %}{{ m(d) }}",
        {"d": nested(60)},
    ),
    "a loop that branches": (
        "{% for d in [d] recursive %}{% if d %}{{ loop([d.inner, d.inner]) }}{% endif %}{% endfor %}",
        {"d": nested(60)},
    ),
    "in a block that is set": (
        "{% set x %}{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
        "{% endset %}",
        {},
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_no_template_renders_for_good(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_guard, "RENDER_LIMIT_S", 0.02)
    source, variables = ENDLESS[name]
    guard(source)
    with pytest.raises(RenderTooSlow, match="takes longer"):
        render(source, **variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'ab' * n }}",
        "{{ n * 'ab' }}",
        "{{ [1] * n }}",
        "{{ n ** n }}",
        "{{ 10 ** (n * n) }}",
    ],
)
def test_no_multiplication_or_power_fills_the_memory(source: str) -> None:
    guard(source)
    with pytest.raises(RenderTooSlow):
        render(source, n=2**40)


def test_a_template_that_takes_too_long_is_the_requests_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_guard, "RENDER_LIMIT_S", 0.02)
    template = "{# its own #}" + ENDLESS["loops"][0]
    made = write_tokenizer(tmp_path, zoo_folder.tokenizer_json(), chat_template=template)
    with pytest.raises(TemplateFailed, match="takes longer"):
        made.render(MESSAGES[:2], tools=None, kwargs={})


def test_a_template_with_a_mistake_still_raises_its_syntax_error() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        guard("{% for %}")
