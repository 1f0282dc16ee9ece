"""`firn chat`: a conversation in the terminal, or one question and its answer.

The reply goes to stdout and everything about it to stderr, so that a pipe carries the reply alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from firn.cli.client import (
    ChatClient,
    ChatOptions,
    ChatTurn,
    Piece,
    PrefillProgress,
    ReasoningText,
    ReplyFinished,
    ReplyText,
    RequestFailed,
    TokenCounts,
    image_url,
)
from firn.cli.talk.markdown import MarkdownStyler
from firn.cli.terminal import quiet_keyboard, typed_lines
from firn.config import UsageError
from firn.core.measure import writing_speed
from firn.core.values import Usage

INTERRUPTED = 130
HELP = """\
/system TEXT  set the system prompt (without TEXT: show it)
/image FILE   show a picture with the next message, or several
/reset        forget the conversation
/exit         leave (Ctrl-D does the same)
Ctrl-C        stop the reply"""
# A model may write escape sequences; a terminal must not obey them.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def chat(
    client: ChatClient, options: ChatOptions, *, prompt: str | None, images: Sequence[Path] = ()
) -> int:
    """Returns the exit code. Raises RequestFailed, except in a conversation, which goes on."""
    pictures = [image_url(path) for path in images]
    model = options.model or client.served_model()
    conversation = TerminalChat(client, replace(options, model=model), Screen())
    conversation.attach(pictures)
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed and prompt is None:
        return _converse(conversation)
    parts = [prompt or "", "" if is_typed or sys.stdin is None else sys.stdin.read()]
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise UsageError("there is nothing to ask: give a prompt or pipe one in")
    return INTERRUPTED if conversation.ask(question).stopped else 0


def _converse(conversation: TerminalChat) -> int:
    """Runs until Ctrl-D, /exit, or Ctrl-C twice in a row. Returns the exit code."""
    screen = conversation.screen
    with typed_lines():
        return _read_and_answer(conversation, screen)


def _read_and_answer(conversation: TerminalChat, screen: Screen) -> int:
    screen.note(f"{conversation.options.model}. /help for help, Ctrl-D to leave.")
    interrupted = False
    while True:
        try:
            line = screen.read_line()
        except EOFError:
            screen.note("")
            return 0
        except KeyboardInterrupt:
            if interrupted:
                screen.note("")
                return 0
            screen.note("\nPress Ctrl-C again, or Ctrl-D, to leave.")
            interrupted = True
            continue
        interrupted = False
        if line in ("/exit", "/quit"):
            return 0
        if line.startswith("/"):
            conversation.command(line)
        elif line:
            try:
                interrupted = conversation.ask(line).stopped
            except RequestFailed as error:
                screen.show_error(error)
                conversation.drop_pictures()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """`usage` is None if the server sent no counts, as for a reply that was stopped."""

    text: str
    usage: Usage | None
    first_token_s: float | None
    total_s: float
    stopped: bool
    reason: str | None


class TerminalChat:
    """The turns so far. Owner: the chat loop."""

    def __init__(self, client: ChatClient, options: ChatOptions, screen: Screen) -> None:
        self.options = options
        self.screen = screen
        self._client = client
        self._turns: list[ChatTurn] = []
        self._images: list[str] = []

    def attach(self, images: Sequence[str]) -> None:
        """Pictures for the next question, as data URLs."""
        self._images += images

    def drop_pictures(self) -> None:
        """After an error: a picture that the server refuses would make every later message fail."""
        if self._images:
            self._images.clear()
            self.screen.note("The message's pictures are dropped; /image attaches them again.")

    def ask(self, text: str) -> ChatReply:
        """Shows the reply as it arrives. A turn without any reply text is forgotten."""
        question = ChatTurn("user", text, tuple(self._images))
        pieces = self._client.ask([*self._turns, question], options=self.options)
        reply = show_reply(pieces, self.screen)
        if reply.text:
            self._turns += [question, ChatTurn("assistant", reply.text)]
            self._images.clear()
        self.screen.summary(reply)
        return reply

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
            self._images.clear()
            self.screen.note("The conversation is forgotten.")
        elif name == "/system":
            if rest.strip():
                self.options = replace(self.options, system=rest.strip())
            self.screen.note(f"System prompt: {self.options.system or 'none'}")
        elif name == "/image":
            self._attach_files(typed_paths(rest.strip()))
        elif name == "/help":
            self.screen.note(HELP)
        else:
            self.screen.note(f"There is no command {name}; /help lists them.")

    def _attach_files(self, paths: Sequence[Path]) -> None:
        try:
            self.attach([image_url(path) for path in paths])
        except UsageError as error:
            self.screen.note(error.message)
        else:
            what = "The picture" if len(paths) == 1 else f"{len(paths)} pictures"
            verb = "goes" if len(paths) == 1 else "go"
            self.screen.note(f"{what} {verb} with the next message." if paths else "Which file?")


def typed_paths(text: str) -> list[Path]:
    """The paths after /image, typed or dropped: one path as it is, or several as a shell quotes them."""
    whole = Path(os.path.expanduser(text))
    if text and whole.exists():
        return [whole]
    try:
        return [Path(os.path.expanduser(word)) for word in shlex.split(text)]
    except ValueError:  # the quote is part of the name
        return [whole]


def show_reply(pieces: Generator[Piece, None, None], screen: Screen) -> ChatReply:
    """Shows and combines the pieces. Ctrl-C closes the stream, which tells the server to stop."""
    start = time.monotonic()
    texts: list[str] = []
    usage, reason, first_s, stopped = None, None, None, False
    try:
        with contextlib.closing(pieces), quiet_keyboard(), screen.waiting():
            for piece in pieces:
                match piece:
                    case PrefillProgress(n_done, n_total):
                        screen.show_progress(n_done, n_total)
                    case ReplyText(text) | ReasoningText(text):
                        if first_s is None:
                            first_s = time.monotonic() - start
                        if isinstance(piece, ReplyText):
                            texts.append(text)
                            screen.show_text(text)
                        else:
                            screen.show_reasoning(text)
                    case ReplyFinished(finish_reason):
                        reason = finish_reason
                    case TokenCounts(counted):
                        usage = counted
    except KeyboardInterrupt:
        stopped = True
    finally:
        screen.end()
    return ChatReply("".join(texts), usage, first_s, time.monotonic() - start, stopped, reason)


class Screen:
    """The terminal. Owner: one conversation. `_mode` says what is on the current line."""

    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        self._out = out or Console(highlight=False)
        self._err = err or Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._mode: str = ""
        self._styler = MarkdownStyler() if self._out.color_system is not None else None

    def read_line(self) -> str:
        """What the user types next. Raises EOFError, KeyboardInterrupt."""
        if self._out.is_terminal:
            return input("> ").strip()
        self._err.out("> ", end="", highlight=False)  # the pipe is for replies
        return input().strip()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Shows that something is under way until the first piece of the reply."""
        if not self._out.is_terminal:
            yield
            return
        try:
            with self._out.status("waiting", spinner="dots") as self._status:
                yield
        finally:
            self._status = None

    def show_progress(self, n_done: int, n_total: int) -> None:
        if self._status is not None:
            self._status.update(f"reading the prompt: {n_done} of {n_total} tokens")

    def show_text(self, text: str) -> None:
        """A terminal with colours gets Markdown in styles; any other, and a pipe, the text as it is."""
        if self._styler is None:
            self._write("text", text, self._out)
            return
        for piece, style in self._styler.feed(text):
            self._write("text", piece, self._out, style)

    def show_reasoning(self, text: str) -> None:
        """Reasoning is not part of the reply: if stdout is a pipe, it goes to stderr."""
        console = self._out if self._out.is_terminal else self._err
        self._write("reasoning", text, console, "dim")

    def _write(self, mode: str, text: str, console: Console, style: str = "") -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._mode and self._mode != mode:
            self.end()
        self._mode = mode
        if console.is_terminal:
            text = text.translate(_CONTROL)
        console.out(text, end="", style=style or None, highlight=False)

    def end(self) -> None:
        """Ends the current line, of the reply or its reasoning."""
        for piece, style in self._styler.flush() if self._styler is not None else ():
            self._mode = "text"
            self._out.out(piece.translate(_CONTROL), end="", style=style or None, highlight=False)
        if self._mode:
            on_err = self._mode == "reasoning" and not self._out.is_terminal
            (self._err if on_err else self._out).out("")
        self._mode = ""

    def summary(self, reply: ChatReply) -> None:
        if text := summary(reply):
            self.note(text)

    def note(self, text: str) -> None:
        self._err.print(text, style="dim", markup=False, soft_wrap=True)

    def show_error(self, error: RequestFailed) -> None:
        self._err.print(f"firn: {error.message}", style="red", markup=False, soft_wrap=True)


def summary(reply: ChatReply) -> str:
    """`12 tokens, 48 of prompt (40 cached), first token after 0.21 s, 33 tokens/s`"""
    parts = []
    if reply.stopped:
        parts.append("stopped")
    if reply.usage is not None:
        usage = reply.usage
        parts.append(f"{usage.n_completion} tokens")
        parts.append(f"{usage.n_prompt} of prompt ({usage.n_cached} cached)")
    if reply.first_token_s is not None:
        parts.append(f"first token after {reply.first_token_s:.2f} s")
        n_tokens = reply.usage.n_completion if reply.usage is not None else 0
        rate = writing_speed(n_tokens, reply.total_s - reply.first_token_s)
        if rate is not None:
            parts.append(f"{rate:.0f} tokens/s")
    if reply.reason == "length":
        parts.append("cut at the token limit")
    return ", ".join(parts)
