"""Pictures of a caller that shares nothing are marked as its own before any of them is cached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from firn.api.calls.prompting import make_prompt
from firn.api.http.auth import SHARED, namespace_of
from firn.core import keys
from firn.core.keys import prompt_tokens
from firn.core.values import (
    Chat,
    GenerateRequest,
    Message,
    Namespace,
    PicturePart,
    Prompt,
    RawText,
    Source,
    TextPart,
)


class Prompts:
    """Remembers the source it was given."""

    def make(self, source: Source, **options: Any) -> Prompt:
        self.source = source
        return Prompt(np.zeros(1, np.int64))


class Services:
    def __init__(self) -> None:
        self.prompts = Prompts()


def owners(owner: Namespace) -> list[str]:
    parts = (TextPart("a"), PicturePart("data:,x"), PicturePart("data:,y", data=b"y"))
    source = Chat((Message("user", parts), Message("assistant", (TextPart("b"),))))
    services: Any = Services()
    make_prompt(services, GenerateRequest("", source), owner)
    made = services.prompts.source
    assert isinstance(made, Chat)
    shown = [p for m in made.messages for p in m.parts if isinstance(p, PicturePart)]
    assert [p.url for p in shown] == ["data:,x", "data:,y"]
    assert shown[1].data == b"y"
    return [p.owner for p in shown]


def test_pictures_belong_to_their_caller() -> None:
    alice = namespace_of("alice")
    assert owners(alice) == [alice, alice]


def test_pictures_of_a_shared_cache_belong_to_nobody() -> None:
    assert owners(SHARED) == ["", ""]


@pytest.mark.parametrize("source", [RawText("a"), Chat((Message("user", (TextPart("a"),)),))])
def test_a_source_without_pictures_is_unchanged(source: Source) -> None:
    services: Any = Services()
    make_prompt(services, GenerateRequest("", source), namespace_of("alice"))
    assert services.prompts.source is source


def test_a_prompt_leaves_the_pool_with_its_key_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    services: Any = Services()
    request = GenerateRequest("", RawText("a"), cache_salt="alice")
    prompt = make_prompt(services, request, SHARED)
    expected = prompt_tokens(prompt)
    monkeypatch.setattr(keys, "prompt_tokens", None)  # whoever computes them again fails
    assert keys.packed_tokens(prompt).tokens.tolist() == expected.tolist()
