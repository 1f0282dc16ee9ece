"""Questions for SmolLM2. Imports nothing, so that other_engine.py can run anywhere."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about snow.",
    "Explain what a prefix cache is.",
    "List three fruits and their colours.",
    "What is 17 plus 25?",
    "Tell me a story about a dog named Max who lives by the sea.",
    "Who wrote Romeo and Juliet?",
    "What is the largest planet of the solar system?",
    "Name the days of the week.",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "What is a prime number?",
)

# A system prompt of more than one block.
SYSTEM = (
    "You are a helpful assistant who answers in one or two sentences. These are the notes of the "
    "mountain station:\n\n"
    + "\n".join(
        f"Day {day}: {snow} cm of new snow, {cold} degrees below zero at seven in the morning, wind "
        f"from the {wind}; {who} walked to the upper hut and came back with {what}."
        for day, snow, cold, wind, who, what in (
            (1, 12, 4, "north", "Anna", "two broken poles"),
            (2, 0, 9, "east", "Matteo", "a bag of old rope"),
            (3, 35, 6, "north-west", "Sofia", "nothing but wet boots"),
            (4, 41, 3, "west", "nobody", "no news"),
            (5, 7, 11, "south", "Anna", "the log book of the hut"),
            (6, 2, 14, "south", "Jonas", "a sack of potatoes"),
            (7, 0, 15, "south-east", "Matteo", "the repaired radio"),
            (8, 19, 8, "north", "Sofia", "a letter for the cook"),
        )
    )
)

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "In 1984 there were 1,234,567 of them (3.14159).",
    "def f(x):\n    return x ** 2\n\n\tprint(f(12))  # 144\n",
    "don't can't I'll you've it's DON'T",
    "Grüße aus Zürich, ça va? Ελληνικά, русский, 日本語, 한국어, العربية",
    "🙂👩‍👩‍👧 𝕬 \u00a0\u200b\ufeff\x00\x7f",
    "   leading, trailing   \n\n\n   and    inside \r\n",
    "a1b2c3 ½ ² ٣ ४ Ⅷ ①",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
    "https://example.com/a?b=c&d=%20e#f user@example.org",
    '{"name": "x", "n": [1, 2.5e-3, null, true]}',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "…—–‘’“”«»·•°§¶©®™",
)
"""Tokenized by llama.cpp and by firn."""
