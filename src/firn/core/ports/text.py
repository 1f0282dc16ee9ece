"""What turns text and pictures into tokens, and tokens into text. All of it is thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from firn.core.values import PicturePart, PreparedPicture


class Tokenizer(Protocol):
    """A model's vocabulary, its chat template, and text to ids and back."""

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids of control tokens, which users never see."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Texts that are always one token, with their ids: control tokens and others."""
        ...

    @property
    def max_token_chars(self) -> int:
        """No token stands for more characters than this."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, which need not be whole characters."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is exactly this text, if there is one."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's source, or of all that chats are rendered with; None: the model has none."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The conversation's text with the generation prompt. Raises TemplateFailed.

        kwargs: may override add_generation_prompt.
        """
        ...

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        """typed: ascending ranges of characters that spell an added token but are plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Exact: leading spaces and special tokens are kept, broken UTF-8 becomes U+FFFD."""
        ...


class Pictures(Protocol):
    """Prepares pictures for prompts."""

    @property
    def placeholder(self) -> str:
        """What stands for a picture in the chat template's output."""
        ...

    @property
    def inline(self) -> bool:
        """Whether the placeholder goes into the message's text, because the chat template has no
        notion of pictures."""
        ...

    @property
    def whole(self) -> bool:
        """Whether a picture's tokens attend to each other and so must be read in one chunk."""
        ...

    def prepare(self, part: PicturePart) -> PreparedPicture:
        """Decode and preprocess one picture. Raises BadPicture."""
        ...
