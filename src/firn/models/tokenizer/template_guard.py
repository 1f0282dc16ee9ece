"""A bound on the time that a chat template may take.

The template is the model's, but the data it loops over is the user's: a schema nested forty deep
can make a recursive macro run for years, and a thread cannot be stopped from outside. So the
compiled template counts a tick at every iteration of a loop and every call of a macro, and checks
the clock now and then. The guard is put into the compiled templates that transformers caches; the
rest of rendering is transformers' own.

It also stops the clock that templates read: see `date_now`.
"""

from __future__ import annotations

import threading
import time
from datetime import date, datetime
from datetime import time as time_of_day
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context
from transformers.utils import chat_template_utils

RENDER_LIMIT_S = 2.0
"""In CPU time of the rendering thread: a template is not to blame while its thread waits."""
CHECK_EVERY = 256
"""Ticks between two readings of the clock, which cost more than a tick."""
MAX_REPEATED = 1 << 20
"""Items or characters that `*` may produce."""
MAX_POWER_BITS = 1 << 12

_TICK = "firn_tick"
_arming = threading.Lock()


class RenderTooSlow(jinja2.TemplateError):
    """The template took too long, or would create a value that is too large."""


def guard(source: str) -> None:
    """Add the bound to the compiled form of this template. Raises jinja2.TemplateError."""
    template = chat_template_utils._compile_jinja_template(source)
    environment = template.environment
    if environment.context_class is GuardedContext:
        return
    with _arming:
        if environment.context_class is GuardedContext:
            return
        environment.code_generator_class = _TickingGenerator
        environment.intercepted_binops = frozenset({"*", "**"})
        environment.call_binop = _bounded_binop
        environment.globals["strftime_now"] = date_now
        fresh = environment.from_string(source)
        template.root_render_func, template.blocks = fresh.root_render_func, fresh.blocks
        environment.context_class = GuardedContext


def date_now(form: str) -> str:
    """The date in the form that a template asks for. The time of day is midnight: with the real one,
    no prompt would begin like the one before."""
    return datetime.combine(date.today(), time_of_day()).strftime(form)


class GuardedContext(Context):
    """One rendering's variables, and its deadline. Owner: the thread that renders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._n_ticks = 0
        self._until = time.thread_time() + RENDER_LIMIT_S

    def tick(self) -> None:
        self._n_ticks += 1
        if self._n_ticks % CHECK_EVERY == 0 and time.thread_time() > self._until:
            raise RenderTooSlow(f"rendering these messages takes longer than {RENDER_LIMIT_S:g} s")


class _TickingGenerator(CodeGenerator):
    """Compiles a tick into the start of the body of every loop, macro and call block."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        for inner in list(node.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            assert isinstance(inner, nodes.For | nodes.Macro | nodes.CallBlock)
            tick = nodes.ExprStmt(nodes.EnvironmentAttribute(_TICK), lineno=inner.lineno)
            inner.body.insert(0, tick)
        super().visit_Template(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Any) -> None:
        target = node.node
        if isinstance(target, nodes.EnvironmentAttribute) and target.name == _TICK:
            self.writeline("context.tick()", node)
        else:
            super().visit_ExprStmt(node, frame)


def _bounded_binop(context: Context, operator: str, left: Any, right: Any) -> Any:
    if operator == "**":
        whole = isinstance(left, int) and isinstance(right, int)
        if whole and left.bit_length() * abs(right) > MAX_POWER_BITS:
            raise RenderTooSlow("a power is too large")
        return left**right
    for item, times in ((left, right), (right, left)):
        repeats = isinstance(item, str | list | tuple) and isinstance(times, int)
        if repeats and len(item) * times > MAX_REPEATED:
            raise RenderTooSlow("a text or list is repeated too often")
    return left * right
