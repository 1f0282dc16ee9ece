"""Texts tokenized in pieces: the same tokens as whole, and no piece is tokenized twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from itertools import chain, islice, product
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from firn.core.fair_pool import FairPool
from firn.models.tokenizer import piecewise
from firn.models.tokenizer.piecewise import PiecewiseEncoder

CONTROL = ["<|im_start|>", "<|im_end|>", "</s>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's the dog's, isn't it? ",
    "def f(a, b):\n    return a or b  # the end\n\n\nclass A:\n\tx = 'y z'\n",
    "Grüße aus dem Süden, ça va? 你好，世界。今天天气很好。 12345 678",
] * 3
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer


def bpe(pre_tokenizer: Any, *, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    return trained(tokenizer, trainer)


def gpt2() -> Tokenizer:
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))


def gpt2_prefixed() -> Tokenizer:
    return bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return bpe(pre_tokenizers.Sequence([split, level]), normalizer=normalizers.NFC())


def smollm() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return bpe(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def gemma() -> Tokenizer:
    """Merges run over the whole text: the words are not split beforehand."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "\u2581")
    learned.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    learned.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    content = json.loads(learned.to_str())
    content["pre_tokenizer"] = None
    return trained_already(content)


def llama2() -> Tokenizer:
    content = json.loads(gemma().to_str())
    prepend = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer = trained_already(content)
    tokenizer.normalizer = prepend
    return tokenizer


def trained_already(content: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=120, show_progress=False, unk_token="<unk>")
    return trained(tokenizer, trainer)


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, show_progress=False, special_tokens=["[UNK]"]
    )
    return trained(tokenizer, trainer)


LONGEST_REMEMBERED = 256
"""In bytes."""
MAKERS: list[Callable[[], Tokenizer]] = [
    gpt2, gpt2_prefixed, qwen, smollm, gemma, llama2, unigram, word_piece,
]  # fmt: skip
TOKENIZERS = {maker.__name__: maker() for maker in MAKERS}
WHOLE_PHRASES = ["llama2"]  # it puts a mark before every text

words = st.sampled_from(
    ["the", "dog", "s", "A", "x1", "'s", "'", "  ", " ", "\n", "\n\n", "\t", "12", ".", "é", "\u0301",
     "你", "，", "_", "\u00a0", "\u2581", "Ġ", *CONTROL]
)  # fmt: skip
texts = st.lists(words, max_size=60).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "MIN_CHARS", 1)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=texts)
@example(text="the dog the dog<|im_end|>\n<|im_start|>A x the dog")
@example(text="the \u0301dog a  b A\u0301 the 'sdog s 's")
@example(text="")
def test_the_same_tokens_as_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert PiecewiseEncoder(tokenizer, tokenizer.get_vocab()).encode(text) == whole(tokenizer, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_where_texts_are_cut(name: str) -> None:
    counted = Counted(TOKENIZERS[name])
    encoder = PiecewiseEncoder(counted.tokenizer, counted.get_vocab())
    encoder.encode("the dog runs")
    assert len(counted.texts[-1]) == (1 if name in WHOLE_PHRASES else 3)
    encoder.encode("一<|im_end|>一")
    assert len(counted.texts[-1]) == 2


class Counted:
    """A tokenizer that records what it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts: list[list[str]] = []
        self.n_chars = 0
        self.tokenizer: Any = self
        self._tokenizer = tokenizer

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.texts.append(list(texts))
        self.n_chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_only_what_is_new_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "MIN_CHARS", 100)
    counted = Counted(TOKENIZERS["qwen"])
    encoder = PiecewiseEncoder(counted.tokenizer, counted.get_vocab())
    chat = "".join(f"<|im_start|>user\n{i} the quick brown fox<|im_end|>\n" for i in range(100))
    encoder.encode(chat)
    counted.n_chars = 0
    longer = chat + "<|im_start|>user\nAnd then?<|im_end|>\n"
    assert encoder.encode(longer) == whole(TOKENIZERS["qwen"], longer)
    assert counted.n_chars < 400


def test_what_one_key_has_sent_is_new_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a text takes must not tell who else has sent it."""
    monkeypatch.setattr(piecewise, "MIN_CHARS", 10)
    counted = Counted(TOKENIZERS["qwen"])
    encoder = PiecewiseEncoder(counted.tokenizer, counted.get_vocab())
    text = "aaaaaaaaaaaa bbbbbbbbbbbb c"

    def n_new(key: str) -> int:
        counted.n_chars = 0
        pool.submit(key, lambda: encoder.encode(text)).result(30)
        return counted.n_chars

    with closing(FairPool(2, name="test")) as pool:
        assert n_new("alice") == len(text)
        assert n_new("alice") < 10
        assert n_new("bob") == len(text)


def llama3() -> Tokenizer:
    """Words that are tokens are looked up, and never merged nor remembered."""
    content = json.loads(qwen().to_str())
    model = content["model"]
    model["ignore_merges"] = True
    for a, b, c in islice(product(ascii_lowercase, repeat=3), piecewise.N_WORDS):
        model["vocab"].setdefault(f"\u0120{a}{b}{c}", len(model["vocab"]) + len(CONTROL))
    return Tokenizer.from_str(json.dumps(content))


def gemma3() -> Tokenizer:
    """It splits at spaces that its normalizer has replaced."""
    content = json.loads(gemma().to_str())
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    return Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": split | {"invert": False}}))


@pytest.mark.parametrize("maker", [*MAKERS, llama3, gemma3])
def test_the_librarys_own_memory_is_full_before_anybody_sends_a_word(
    maker: Callable[[], Tokenizer],
) -> None:
    """It keeps the first 10,000, and is twice as fast with those: it would tell what others send."""
    counted = Counted(maker())
    PiecewiseEncoder(counted.tokenizer, counted.get_vocab())
    normal, split, model = (
        getattr(counted.tokenizer, part) for part in ("normalizer", "pre_tokenizer", "model")
    )
    words: set[str] = set()
    for text in chain.from_iterable(counted.texts):
        text = normal.normalize_str(text) if normal else text
        words.update([word for word, _ in split.pre_tokenize_str(text)] if split else [text])
    if getattr(model, "ignore_merges", False):
        words.difference_update(counted.get_vocab())
    assert len({word for word in words if len(word.encode()) < LONGEST_REMEMBERED}) > 10_000


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "MIN_CHARS", 10)
    monkeypatch.setattr(piecewise, "MAX_CHARS", 60)
    counted = Counted(TOKENIZERS["qwen"])
    encoder = PiecewiseEncoder(counted.tokenizer, counted.get_vocab())

    def n_new(text: str) -> int:
        counted.n_chars = 0
        encoder.encode(text)
        return counted.n_chars

    first, second = "aaaaaaaaaaaa bbbbbbbbbbbb c", "dddddddddddd eeeeeeeeeeee f"
    assert n_new(first) == len(first)
    assert n_new(second) == len(second)
    assert n_new(first) == 2  # used again, so it stays longer than the second
    n_new("gggggggggggg hhhhhhhhhhhh i")
    assert n_new(first) == 2
    assert n_new(second) > 2


def with_added(*added: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZERS["qwen"].to_str())
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("dog", rstrip=True),
        AddedToken("dog", lstrip=True),
        AddedToken("the dog"),
        AddedToken("g<|im", normalized=False),
        AddedToken("the", single_word=True),
    ],
    ids=["takes the space behind it", "before it", "a phrase", "overlaps", "a single word"],
)
def test_added_tokens_that_reach_over_a_cut(added: AddedToken) -> None:
    tokenizer = with_added(added)
    encoder = PiecewiseEncoder(tokenizer, tokenizer.get_vocab())
    for text in ("the dog the dogs", "a the b", "dog<|im_end|> the dog", "<|im_start|>dog x"):
        assert encoder.encode(text) == whole(tokenizer, text), text


def test_a_merge_of_two_words_prevents_cuts_between_words() -> None:
    content = json.loads(TOKENIZERS["gemma"].to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["g\u2581"] = max(vocabulary.values()) + 1
    content["model"]["merges"].insert(0, ["g", "\u2581"])
    tokenizer = trained_already(content)
    text = "dog dog the dog"
    assert PiecewiseEncoder(tokenizer, tokenizer.get_vocab()).encode(text) == whole(tokenizer, text)
