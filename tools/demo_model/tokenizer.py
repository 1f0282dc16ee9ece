"""Make the models' tokenizer: a byte-level BPE over the training half of the invented world.

    python -m tools.demo_model.tokenizer FOLDER

writes tokenizer.json, tokenizer_config.json and chat_template.jinja into FOLDER and checks that
the template and `dialogues.segments` agree.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.demo_model.dialogues import plain, segments, tool_dialogue
from transformers import AutoTokenizer

from firn.demo.facts import make_session

VOCAB_SIZE = 2048
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Digits are split in pairs from the left, without the space before them, so that a number has the
# same tokens everywhere, and few of them.
SPLIT = r" ?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED = re.compile("|".join(map(re.escape, (END, START, STOP, *MARKS))))
N_SESSIONS = 4000
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def corpus() -> Iterator[str]:
    for seed in range(N_SESSIONS):
        if seed % 8:
            dialogue = plain(make_session(seed, n_facts=40, n_questions=15, split="train"))
        else:
            dialogue = tool_dialogue(seed, n_facts=10, n_questions=4, n_calls=4)
        text = "".join(s.text for s in segments(dialogue))
        yield from (part for part in MARKED.split(text) if part)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            *(AddedToken(t, special=True, normalized=False) for t in (END, START, STOP)),
            *(AddedToken(t, special=False, normalized=False) for t in MARKS),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": END,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(TEMPLATE, folder / TEMPLATE.name)


def check(folder: Path) -> None:
    """The template renders what training saw, and cutting at segments does not move a token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for seed in range(40):
        if seed % 2:
            dialogue = plain(make_session(seed, n_facts=12, n_questions=8))
        else:
            dialogue = tool_dialogue(seed, n_facts=5, n_questions=3, n_calls=3, split="held-out")
        tools = list(dialogue.tools) or None
        text = tokenizer.apply_chat_template(list(dialogue.messages), tools=tools, tokenize=False)
        parts = [s.text for s in segments(dialogue)]
        assert text == "".join(parts), (text, "".join(parts))
        whole = tokenizer.encode(text, add_special_tokens=False)
        cut = [t for part in parts for t in tokenizer.encode(part, add_special_tokens=False)]
        assert whole == cut
        assert tokenizer.decode(whole) == text


def main() -> None:
    folder = Path(sys.argv[1])
    save(train(), folder)
    check(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    document = make_session(1, n_facts=1000, n_questions=1).document
    print(f"{len(tokenizer)} tokens; {len(tokenizer.encode(document)) / 1000:.2f} tokens a fact")


if __name__ == "__main__":
    main()
