"""Pictures through the whole server: three APIs, real clients, memory and SSD, restarts, faults."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from firn.config import CacheConfig, Config, EngineConfig, ImagesConfig, ModelConfig
from tests.api.real import Real, serving
from tests.models.vision import gallery
from tests.models.vision.gallery import picture, said, user

NAME = "qwen3_vl"
LONG = (
    "Snow that outlives its season becomes firn: grains packed by their own weight, not ice. " * 3
)


def config(folder: Path, **cache: Any) -> Config:
    return Config(
        model=ModelConfig(path=str(gallery.folder(NAME))),
        engine=EngineConfig(prefill_chunk=32),
        cache=CacheConfig(ssd_cache_dir=folder, cache_block_tokens=32, **cache),
        images=ImagesConfig(max_image_mb=1, max_image_megapixels=1.0),
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    wanted = config(tmp_path_factory.mktemp("ssd"))
    with serving(gallery.folder(NAME), config=wanted) as running:
        yield running


def image_url(number: int | Image.Image) -> dict[str, Any]:
    shown = number if isinstance(number, Image.Image) else gallery.part(number)
    url = gallery.data_url(shown) if isinstance(shown, Image.Image) else shown.url  # type: ignore[union-attr]
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(client: openai.OpenAI, *messages: Any, n: int = 12) -> Any:
    return client.chat.completions.create(
        model="", messages=list(messages), temperature=0, max_tokens=n,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def wanted_text(*chat: Any, n: int = 12) -> str:
    _, tokens, margins = gallery.reference(NAME, chat, n)
    assert min(margins) > gallery.TIE
    tokenizer = gallery.tokenizer(NAME)
    return tokenizer.decode([t for t in tokens if t not in tokenizer.special])


def reply_text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_picture_is_answered_as_mlx_vlm_answers_it(real: Real) -> None:
    asked = {"role": "user", "content": [text("Look: "), image_url(1), text("?")]}
    answer = ask(real.openai(), asked)
    chat = [user("Look: ", 1, "?")]
    # A character that the limit has cut off is held back.
    assert reply_text(answer).strip() == wanted_text(*chat).rstrip("\ufffd").strip()
    assert answer.usage.prompt_tokens == len(gallery.prompt_of(NAME, *chat))
    models = real.openai().models.list()
    assert models.data


def test_a_second_question_finds_the_picture_read(real: Real) -> None:
    first = {"role": "user", "content": [text(LONG), image_url(2), text("?")]}
    one = ask(real.openai(), first)
    two = ask(real.openai(), first)
    assert two.usage.prompt_tokens_details.cached_tokens == one.usage.prompt_tokens - 1
    assert reply_text(one) == reply_text(two)
    more = ask(real.openai(), first, {"role": "assistant", "content": "Yes."},
               {"role": "user", "content": [text("And "), image_url(3)]})  # fmt: skip
    span = gallery.prompt_of(NAME, user(LONG, 2, "?"), said("Yes."), user("And ", 3)).picture_spans[
        0
    ]
    assert more.usage.prompt_tokens_details.cached_tokens >= span.end


def test_streams_too(real: Real) -> None:
    asked = {"role": "user", "content": [image_url(4), text("What is it?")]}
    pieces = real.openai().chat.completions.create(
        model="", messages=[asked], temperature=0, max_tokens=12, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    got = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
    assert got.strip() == wanted_text(user(4, "What is it?")).strip()


def test_the_responses_api(real: Real) -> None:
    content = [
        {"type": "input_text", "text": "Look: "},
        {"type": "input_image", "image_url": image_url(1)["image_url"]["url"], "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]
    got = real.openai().responses.create(
        model="", input=[{"role": "user", "content": content}], temperature=0,
        max_output_tokens=12, extra_body={"ignore_eos": True},
    )  # fmt: skip
    n_prompt = len(gallery.prompt_of(NAME, user("Look: ", 1, "?")))
    assert got.usage is not None
    assert got.usage.input_tokens == n_prompt


def test_the_anthropic_api(real: Real) -> None:
    file = io.BytesIO()
    picture(1, 80, 64).save(file, "PNG")
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(file.getvalue()).decode(),
    }
    client = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{real.port}", api_key="unused", max_retries=0
    )
    content: Any = [text("Look: "), {"type": "image", "source": source}, text("?")]
    got = client.messages.create(
        model="", max_tokens=12, messages=[{"role": "user", "content": content}]
    )
    n_prompt = len(gallery.prompt_of(NAME, user("Look: ", 1, "?")))
    usage = got.usage
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0) == n_prompt


def test_firn_chat_shows_a_file(real: Real, tmp_path: Path) -> None:
    picture(1, 80, 64).save(tmp_path / "photo.png")
    run = subprocess.run(
        [sys.executable, "-m", "firn", "chat", "--url", f"http://127.0.0.1:{real.port}",
         "--temperature", "0", "--max-tokens", "12", "--image", "photo.png", "What is it?"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    asked = user(1, "What is it?")
    n_prompt = len(gallery.prompt_of(NAME, asked))
    assert f"{n_prompt} of prompt" in run.stderr
    assert printable(run.stdout) == printable(wanted_text(asked))


def printable(text: str) -> str:
    """The text without what a console leaves out."""
    return "".join(c for c in text if c >= " ").strip()


def bad_urls() -> dict[str, tuple[str, str]]:
    wide = gallery.data_url(Image.new("L", (1200, 1000)))
    return {
        "https://example.com/a.png": ("https://example.com/a.png", "does not fetch images"),
        "file": ("file:///etc/passwd", "neither a data URL"),
        "base64": ("data:image/png;base64,!!!", "not valid base64"),
        "not a picture": ("data:image/png;base64,aGVsbG8=", "is not a PNG"),
        "too many pixels": (wide, "1200 x 1000"),
        "too many bytes": ("data:image/png;base64," + "A" * 2_000_000, "over the limit"),
        "too flat": (gallery.data_url(Image.new("RGB", (900, 1))), "aspect ratio"),
    }


@pytest.mark.parametrize("what", bad_urls())
def test_a_bad_picture_is_a_400_that_names_the_part(real: Real, what: str) -> None:
    url, said = bad_urls()[what]
    message = {"role": "user", "content": [text("a"), {"type": "image_url", "image_url": url}]}
    with pytest.raises(openai.BadRequestError) as fault:
        ask(real.openai(), {"role": "system", "content": "s"}, message)
    assert fault.value.param == "messages[1].content[1]"
    assert said in fault.value.message
    assert ask(real.openai(), {"role": "user", "content": "still there?"}, n=2).choices


def test_addresses_are_checked_where_they_may_be_fetched(tmp_path: Path) -> None:
    """A private address, in all three APIs; no connection is made."""
    wanted = config(tmp_path)
    wanted = replace(wanted, images=replace(wanted.images, allow_image_urls=True))
    url = "https://127.0.0.1:9/a.png"
    with serving(gallery.folder(NAME), config=wanted) as running:
        said = []
        for path, body in {
            "chat/completions": {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": url}}]}]},
            "responses": {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": url}]}]},
            "messages": {"max_tokens": 4, "messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "url", "url": url}}]}]},
        }.items():  # fmt: skip
            answer = httpx.post(f"http://127.0.0.1:{running.port}/v1/{path}", json=body)
            assert answer.status_code == 400
            said.append(answer.json()["error"]["message"])
    where = ("messages[0].content[0]", "input[0].content[0]", "messages[0].content[0].source")
    why = "the image's address is not on the public internet."
    assert said == [f"{part}: {why}" for part in where]


def test_counting_tokens_sees_pictures(real: Real) -> None:
    url = image_url(1)["image_url"]["url"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    asked = {
        "messages/count_tokens": [text("Look: "), {"type": "image", "source": source}, text("?")],
        "responses/input_tokens": [
            {"type": "input_text", "text": "Look: "},
            {"type": "input_image", "image_url": url},
            {"type": "input_text", "text": "?"},
        ],
    }
    n_prompt = len(gallery.prompt_of(NAME, user("Look: ", 1, "?")))
    for path, content in asked.items():
        chat = [{"role": "user", "content": content}]
        body = {"model": "", "input" if path.startswith("responses") else "messages": chat}
        response = httpx.post(f"http://127.0.0.1:{real.port}/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["input_tokens"] == n_prompt, path


def test_after_a_restart_the_pictures_are_still_read(tmp_path: Path) -> None:
    """Records of vision prompts are written to disk, and another engine restores them."""
    asked = {"role": "user", "content": [text(LONG), image_url(5), text("Say.")]}
    with serving(gallery.folder(NAME), config=config(tmp_path)) as first:
        cold = ask(first.openai(), asked)
    assert any(tmp_path.rglob("*.safetensors"))
    with serving(gallery.folder(NAME), config=config(tmp_path)) as second:
        warm = ask(second.openai(), asked)
        other = {"role": "user", "content": [text(LONG), image_url(6), text("Say.")]}
        fresh = ask(second.openai(), other)
        arguments: Any = second.server.engine.parts.runner._forward.arguments  # type: ignore[attr-defined]
        assert arguments.features.n_misses == 1  # the other picture's
    assert reply_text(warm) == reply_text(cold)
    assert warm.usage.prompt_tokens_details.cached_tokens >= cold.usage.prompt_tokens - 32
    span = gallery.prompt_of(NAME, user(LONG, 6, "Say.")).picture_spans[0]
    assert 0 < fresh.usage.prompt_tokens_details.cached_tokens <= span.start


def test_evicted_prompts_are_found_on_disk(tmp_path: Path) -> None:
    """A memory tier that holds little: N of N replays hit."""
    chats = [
        {"role": "user", "content": [text(f"{i} {LONG * 3}"), image_url(i), text("Say.")]}
        for i in range(6)
    ]
    with serving(gallery.folder(NAME), config=config(tmp_path, cache_memory_mb=1)) as running:
        cold = [ask(running.openai(), c, n=4) for c in chats]
        warm = [ask(running.openai(), c, n=4) for c in chats]
        stats = httpx.get(f"http://127.0.0.1:{running.port}/v1/cache/stats").json()
    assert sum(stats["evictions"].values()) > 0
    assert stats["ssd"]["records"] >= len(chats)
    assert stats["tokens"]["by_tier"]["ssd"] > 0
    for a, b in zip(cold, warm, strict=True):
        assert reply_text(a) == reply_text(b)
        assert b.usage.prompt_tokens_details.cached_tokens > a.usage.prompt_tokens // 2
