"""The tokenizer port over real tokenizers: byte-level BPE, and pieces with marked spaces."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from firn.core.errors import TemplateFailed
from firn.models.load.loader import load_tokenizer
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.models.tokenizer.plain_text import PlainText
from tests.waiting import wait_until
from tests.zoo import folder as zoo_folder

TEXTS = [
    "",
    " ",
    "a",
    "   leading",
    "trailing   ",
    "two  spaces",
    "line\nbreak\r\n\ttab\n\n\n",
    "The quick brown fox; {\"name\": [1, 2.5e-3]} != 'x'",
    "Grüße, señor — “quotes” … ™ ½",
    "日本語 한국어 中文 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦🇩🇪🏳️‍🌈",
    "z̸a̷l̶g̵o \u200b\u00a0\ufeff",
    "\x00\x01\x7f",
    "system user assistant " * 50,
]
CORPUS = ["The quick brown fox jumps over the lazy dog. ", "Grüße aus dem Süden, ça va? "] * 4

settled = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write_tokenizer(path: Path, content: str, **config: Any) -> HfTokenizer:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 2}))
    (path / "tokenizer.json").write_text(content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return write_tokenizer(
        tmp_path_factory.mktemp("byte_level"),
        zoo_folder.tokenizer_json(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=zoo_folder.CHAT_TEMPLATE,
    )


def pieces_json() -> str:
    """Unigram, as SentencePiece makes it: spaces are marks, unknown characters are bytes."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, show_progress=False, unk_token="<unk>")
    raw.train_from_iterator(CORPUS, trainer)
    learned = [(p, s) for p, s in json.loads(raw.to_str())["model"]["vocab"] if p != "<unk>"]
    special = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    units = [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    model = models.Unigram([*special, *learned, *units], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(tokenizer.to_str())


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return write_tokenizer(
        tmp_path_factory.mktemp("pieces"), pieces_json(), bos_token="<s>", unk_token="<unk>"
    )


def bytes_of(tokenizer: HfTokenizer, text: str) -> bytes:
    ids = tokenizer.encode(text, add_special=False)
    return b"".join(tokenizer.token_bytes(t) for t in ids)


# --- text to ids and back ------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_byte_level_text_comes_back_as_it_was(byte_level: HfTokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text, add_special=False)) == text
    assert bytes_of(byte_level, text) == text.encode()


@given(text=st.text(max_size=60))
@settled
def test_any_text_comes_back_as_it_was(byte_level: HfTokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text, add_special=False)) == text
    assert bytes_of(byte_level, text) == text.encode()


@pytest.mark.parametrize("text", TEXTS[2:], ids=range(len(TEXTS) - 2))
def test_pieces_come_back_with_the_space_they_begin_with(pieces: HfTokenizer, text: str) -> None:
    """SentencePiece puts a space before the first word and takes it away in decoding."""
    spaced = text if text.startswith(" ") else f" {text}"
    assert bytes_of(pieces, text) == spaced.encode()
    assert pieces.decode(pieces.encode(text, add_special=False)) == spaced[1:]


def test_broken_utf8_is_shown_and_not_dropped(byte_level: HfTokenizer) -> None:
    ids = byte_level.encode("日", add_special=False)
    assert len(ids) == 3
    assert byte_level.decode(ids[:1]) == "\ufffd"
    assert byte_level.token_bytes(ids[0]) == "日".encode()[:1]


def test_pieces_have_bytes_for_what_they_do_not_know(pieces: HfTokenizer) -> None:
    ids = pieces.encode("x日", add_special=False)
    assert b"".join(pieces.token_bytes(t) for t in ids[-3:]) == "日".encode()


def test_a_token_that_does_not_exist_stands_for_nothing(
    byte_level: HfTokenizer, pieces: HfTokenizer
) -> None:
    assert byte_level.token_bytes(10_000) == b""
    assert pieces.token_bytes(10_000) == b""


def test_threads_do_not_disturb_each_other(byte_level: HfTokenizer) -> None:
    texts = [t * n for t in TEXTS for n in (1, 7)]
    want = [byte_level.encode(t, add_special=False) for t in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            encoded = list(pool.map(lambda t: byte_level.encode(t, add_special=False), texts))
            assert encoded == want
            assert list(pool.map(byte_level.decode, want)) == texts


# --- special tokens ------------------------------------------------------------------------


def test_special_tokens_are_known(byte_level: HfTokenizer) -> None:
    end, start = byte_level.token_id("<|im_end|>"), byte_level.token_id("<|im_start|>")
    assert start is not None
    assert byte_level.eos == {end}
    assert byte_level.special == {byte_level.token_id("<|endoftext|>"), start, end}
    assert byte_level.token_id("<think>") not in byte_level.special, "that is markup"
    assert byte_level.encode("<|im_start|>user", add_special=False)[0] == start
    assert byte_level.decode([start]) == "<|im_start|>", "special tokens are kept"
    assert byte_level.token_bytes(start) == b"<|im_start|>"


def test_special_pieces_are_known(pieces: HfTokenizer) -> None:
    assert pieces.special == {0, 1, 2}
    assert pieces.eos == {2}
    assert pieces.token_bytes(2) == b"</s>"


def test_add_special_adds_what_the_model_wants(tmp_path: Path) -> None:
    raw = Tokenizer.from_str(pieces_json())
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = write_tokenizer(tmp_path, str(raw.to_str()), bos_token="<s>")
    bare = tokenizer.encode("The fox", add_special=False)
    assert tokenizer.encode("The fox", add_special=True) == [1, *bare]


@pytest.mark.parametrize("text", ["a", " the", "é", "Ã", "Ġ", "\n", "<tool_call>", "日"])
def test_token_id_is_the_token_of_exactly_this_text(byte_level: HfTokenizer, text: str) -> None:
    token = byte_level.token_id(text)
    ids = byte_level.encode(text, add_special=False)
    assert token == (ids[0] if len(ids) == 1 else None)


def test_token_id_knows_pieces_by_their_text(pieces: HfTokenizer) -> None:
    for text in (" ", "</s>"):
        token = pieces.token_id(text)
        assert token is not None
        assert pieces.token_bytes(token) == text.encode()
    assert pieces.token_id("▁") is None
    assert pieces.token_id("no such piece") is None


# --- templates -----------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_template_is_rendered_with_the_generation_prompt(byte_level: HfTokenizer) -> None:
    text = byte_level.render(HELLO, tools=None, kwargs={})
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    bare = byte_level.render(HELLO, tools=None, kwargs={"add_generation_prompt": False})
    assert bare == "<|im_start|>user\nHello<|im_end|>\n"
    assert byte_level.chat_template == zoo_folder.CHAT_TEMPLATE


def test_tools_reach_the_template(byte_level: HfTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    assert "look_up" in byte_level.render(HELLO, tools=[tool], kwargs={})


def test_content_that_is_none_reaches_the_template_as_none(tmp_path: Path) -> None:
    """DeepSeek's and others write a call only where there is no content."""
    source = "{% for m in messages %}{{ 'calls' if m.content is none else m.content }}{% endfor %}"
    tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=source)
    assert tokenizer.render(
        [*HELLO, {"role": "assistant", "content": None}], tools=None, kwargs={}
    ) == ("Hellocalls")


def test_a_template_knows_what_transformers_tells_every_template(tmp_path: Path) -> None:
    source = (
        "{{ eos_token }} {{ enable_thinking }} {{ tools is none }} {{ documents is none }} "
        "{{ mood }} {{ add_generation_prompt }}"
    )
    tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=source)
    text = tokenizer.render(HELLO, tools=None, kwargs={"mood": "calm"})
    assert text == "</s> False True True calm True"
    text = tokenizer.render(HELLO, tools=[], kwargs={"enable_thinking": True})
    assert text == "</s> True False True  True"


def test_a_template_that_wants_tools_as_text_gets_them_with_the_date(tmp_path: Path) -> None:
    """FireFunction's refuses every chat without these two."""
    source = "{{ 'Tools: ' + functions }}{{ ' Today is ' + datetime + '.' }}"
    tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=source)
    text = tokenizer.render(HELLO, tools=None, kwargs={"datetime": "Monday"})
    assert text == "Tools: [] Today is Monday."
    text = tokenizer.render(HELLO, tools=[TOOL], kwargs={})
    assert json.loads(text.removeprefix("Tools: ").partition(" Today")[0]) == [TOOL]
    assert re.search(r"Today is \d{4}-\d\d-\d\d 00:00:00 GMT\.", text), "the same all day"


def test_the_time_of_day_is_midnight_so_that_prompts_stay_the_same(tmp_path: Path) -> None:
    source = "{{ strftime_now('%H:%M:%S.%f') }} {{ strftime_now('%Y-%m-%d') }}"
    tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=source)
    text = tokenizer.render(HELLO, tools=None, kwargs={})
    assert re.fullmatch(r"00:00:00\.000000 \d{4}-\d\d-\d\d", text)


NAMED = [
    {"name": "default", "template": "plain {{ messages[-1].content }}"},
    {"name": "tool_use", "template": "<tool_call> {{ tools | length }} {{ messages[-1].content }}"},
]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
CALL = {"type": "function", "id": "1", "function": {"name": "look_up", "arguments": {}}}


@pytest.mark.parametrize("in_files", [False, True])
def test_a_chat_with_calls_keeps_its_template_when_a_request_has_no_tools(
    tmp_path: Path, in_files: bool
) -> None:
    """Some models have one template for tools and one for chats without."""
    if in_files:  # as transformers saves them
        tmp_path.joinpath("chat_template.jinja").write_text(NAMED[0]["template"])
        folder = tmp_path / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text(NAMED[1]["template"])
        tokenizer = write_tokenizer(tmp_path, pieces_json())
    else:
        tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=NAMED)
    assert "plain" in (tokenizer.chat_template or "")
    assert "<tool_call>" in (tokenizer.chat_template or "")
    assert tokenizer.render(HELLO, tools=None, kwargs={}) == "plain Hello"
    assert tokenizer.render(HELLO, tools=[TOOL], kwargs={}) == "<tool_call> 1 Hello"
    called = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *HELLO]
    assert tokenizer.render(called, tools=[TOOL], kwargs={}) == "<tool_call> 1 Hello"
    assert tokenizer.render(called, tools=[], kwargs={}) == "<tool_call> 0 Hello"


def test_a_model_whose_templates_have_other_names_uses_its_first(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag {{ messages[-1].content }}"}]
    tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=named)
    assert tokenizer.render(HELLO, tools=[TOOL], kwargs={}) == "rag Hello"


def test_the_callers_messages_are_not_changed(byte_level: HfTokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    byte_level.render(messages, tools=None, kwargs={})
    assert messages == HELLO


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", ""),
        ("{{ messages[0].content + 5 }}", ""),
        ("{{ 1 / 0 }}", ""),
        ("{% for x in messages %}", ""),
        ("{{ messages | no_such_filter }}", ""),
        ("{{ nothing.at.all }}", ""),
    ],
)
def test_a_template_that_refuses_is_the_requests_error(
    tmp_path: Path, template: str, said: str
) -> None:
    tokenizer = write_tokenizer(tmp_path, pieces_json(), chat_template=template)
    with pytest.raises(TemplateFailed) as caught:
        tokenizer.render(HELLO, tools=None, kwargs={})
    assert caught.value.status == 400
    assert said in caught.value.message


def test_a_model_without_a_template_says_so(pieces: HfTokenizer) -> None:
    assert pieces.chat_template is None
    with pytest.raises(TemplateFailed):
        pieces.render(HELLO, tools=None, kwargs={})


# --- typed tokens --------------------------------------------------------------------------


def typed_places(text: str, word: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(re.escape(word), text)]


@pytest.mark.parametrize("text", ["a</s>b", "</s>", " </s> x </s>", "fox</s></s>", "x<s></s>"])
def test_typed_tokens_are_text_to_pieces_with_marked_spaces(pieces: HfTokenizer, text: str) -> None:
    """In a vocabulary of pieces, control tokens are pieces too, and are found in no other way."""
    ids = pieces.encode(text, add_special=False, typed=typed_places(text, "</s>"))
    assert pieces.token_id("</s>") not in ids
    assert pieces.decode(ids).strip() == text.strip()
    whole = pieces.encode(text, add_special=False)
    assert (pieces.token_id("<s>") in ids) == (pieces.token_id("<s>") in whole)


def test_typed_text_gets_its_special_tokens_around_it(pieces: HfTokenizer) -> None:
    bare = pieces.encode("a</s>", add_special=False, typed=[(1, 5)])
    whole = pieces.encode("a</s>", add_special=True, typed=[(1, 5)])
    plain = pieces.encode("a", add_special=True)
    assert whole[: len(whole) - len(bare)] == plain[: len(whole) - len(bare)]
    assert whole[-len(bare) :] == bare


def test_a_tokenizer_that_cannot_be_copied_splits_typed_tokens(byte_level: HfTokenizer) -> None:
    other = HfTokenizer(byte_level._wrapper)
    other._has_copy = False
    text = "a<|im_end|>b<|im_end|>"
    ids = other.encode(text, add_special=False, typed=[(1, 11)])
    assert ids.count(byte_level.token_id("<|im_end|>")) == 1
    assert other.decode(ids) == text


class ListingLock:
    """A lock that lists the threads that came to it."""

    def __init__(self) -> None:
        self._lock, self.came = threading.Lock(), list[int]()

    def __enter__(self) -> None:
        self.came.append(threading.get_ident())
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_make_one_copy(byte_level: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to come makes it while all others wait for the lock, or make their own."""
    other, text = HfTokenizer(byte_level._wrapper), "<|im_end|>" * 3
    other._copying = lock = ListingLock()  # type: ignore[assignment]
    n_threads, copies = 4, []

    def copy(*args: Any) -> PlainText:
        copies.append(args)
        wait_until(lambda: n_threads in (len(lock.came), len(copies)))
        return PlainText(*args)

    def encode(_: int) -> tuple[int, ...]:
        return tuple(other.encode(text, add_special=False, typed=[(0, 10)]))

    monkeypatch.setattr("firn.models.tokenizer.hf_tokenizer.PlainText", copy)
    with ThreadPoolExecutor(n_threads) as pool:
        assert len(set(pool.map(encode, range(n_threads)))) == 1
    assert len(copies) == 1


def test_truncation_and_padding_in_the_file_are_for_training(tmp_path: Path) -> None:
    content = json.loads(zoo_folder.tokenizer_json())
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    tokenizer = write_tokenizer(tmp_path, json.dumps(content), eos_token="<|im_end|>")
    text = "The quick brown fox jumps over <|im_end|>"
    for typed in ((), [(31, 41)]):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, typed=typed)) == text
