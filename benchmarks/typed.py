"""What it costs to make a long prompt, and to treat typed control tokens in it as text.

    .venv/bin/python benchmarks/typed.py [--model FOLDER] [--tokens 100000] [--rounds 15]

The chat of an agent that has read `--tokens` tokens of Python files; then the same with a few and
with many control tokens typed in those files. `again` tokenizes the same text once more, as the
next turn does. `more` is what the guard adds to a turn, as a share of the time that tokenizing
takes the first time. Times are CPU times of the fastest rounds, because the machine may be busy.

Takes about half a minute.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer as Definition

from firn.core.ports import Tokenizer
from firn.core.values import Message, TextPart, ToolCall
from firn.demo.builtin import builtin_folder
from firn.models.load.loader import load_tokenizer
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.models.tokenizer.piecewise import PiecewiseEncoder
from firn.text.prompt.messages import normalize_calls, to_template
from firn.text.prompt.rendering import Content
from firn.text.prompt.template import MESSAGE_OPENERS, Template
from firn.text.prompt.typed_control import TypedControl, control_texts
from firn.text.reply.formats import assistant_markup, markup_tokens

FILE_CHARS = 20_000


def files() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")[:FILE_CHARS]


def chat(tokenizer: Tokenizer, n_tokens: int, *, typed: int) -> tuple[Message, ...]:
    """A question, and as many files read as it takes. typed: control tokens in them."""
    control = sorted(t for t, i in tokenizer.added_tokens.items() if i in tokenizer.special)
    texts: list[str] = []
    n_known = 0
    for text in files():
        texts.append(text)
        n_known += len(tokenizer.encode(text, add_special=False))
        if n_known >= n_tokens:
            break
    for i in range(typed):
        at = i * len(texts) // typed
        half = len(texts[at]) // 2
        texts[at] = texts[at][:half] + control[i % len(control)] + texts[at][half:]
    messages = [Message("user", (TextPart("Read these files."),))]
    for i, text in enumerate(texts):
        call = ToolCall(f"call_{i}", "read", {"path": f"/src/{i}.py"})
        messages.append(Message("assistant", (), tool_calls=(call,)))
        messages.append(Message("tool", (TextPart(text),), tool_call_id=call.id, name="read"))
    return tuple(messages)


def fastest_ms(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fastest run of each, in milliseconds; they take turns."""
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.process_time()
            work()
            took[name].append(1e3 * (time.process_time() - began))
    return {name: min(times) for name, times in took.items()}


def first_ms(tokenizer: HfTokenizer, text: str) -> float:
    definition = Definition.from_str(tokenizer.definition or "")
    encoder = PiecewiseEncoder(definition, definition.get_vocab())
    return fastest_ms({"first": lambda: encoder.encode(text)}, 1)["first"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model's folder (default: the built-in one)")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    folder = args.model or builtin_folder("firn-demo")
    assert folder is not None
    tokenizer = load_tokenizer(folder)
    template = Template.read(tokenizer)
    known = {*markup_tokens(), *MESSAGE_OPENERS}
    guard = TypedControl(control_texts(tokenizer, known), own=assistant_markup())

    def render(content: Content) -> str:
        messages = to_template(
            normalize_calls(content.messages, template.style), style=template.style
        )
        return tokenizer.render(messages, tools=None, kwargs={})

    print(f"{folder.name}: {len(tokenizer.added_tokens)} added tokens")
    heads = ["typed", "tokens", "render, ms", "with the guard", "tokenize, ms", "again"]
    print(f"| {' | '.join(heads)} | with the guard | more |")
    print("|---|---|---|---|---|---|---|---|")
    for n_typed in (0, 3, 300):
        content = Content(chat(tokenizer, args.tokens, typed=n_typed))
        made = guard.render(content, render)
        n_tokens = len(tokenizer.encode(made.text, add_special=False, typed=made.typed))
        works: dict[str, Callable[[], object]] = {
            "render": partial(render, content),
            "guarded": partial(guard.render, content, render),
            "again": partial(tokenizer.encode, made.text, add_special=False),
            "typed": partial(tokenizer.encode, made.text, add_special=False, typed=made.typed),
        }
        took = fastest_ms(works, args.rounds)
        first = min(first_ms(tokenizer, made.text) for _ in range(args.rounds))
        extra = took["guarded"] - took["render"]
        extra += took["typed"] - took["again"] if n_typed else 0.0
        times = [took["render"], took["guarded"], first, took["again"], took["typed"]]
        shown = " | ".join(f"{ms:.1f}" for ms in times)
        print(f"| {n_typed} | {n_tokens} | {shown} | {extra / first:+.1%} |")


if __name__ == "__main__":
    main()
