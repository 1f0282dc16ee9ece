"""Writes llama_cpp.json: llama.cpp's tokens and greedy replies with the same GGUF file.

pip install llama-cpp-python
python tests/real/other_engine.py SmolLM2-135M-Instruct.Q4_1.gguf > tests/real/llama_cpp.json
"""

from __future__ import annotations

import json
import sys

from questions import QUESTIONS, TEXTS

N_REPLY = 32


def main(path: str) -> None:
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=2048, verbose=False)
    tokens = [model.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]
    replies = []
    for question in QUESTIONS:
        model.reset()
        reply = model.create_chat_completion(
            [{"role": "user", "content": question}],
            temperature=0,
            max_tokens=N_REPLY,
            repeat_penalty=1.0,
        )
        replies.append(reply["choices"][0]["message"]["content"])
    found = {"llama_cpp_python": llama_cpp.__version__, "tokens": tokens, "replies": replies}
    json.dump(found, sys.stdout, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main(sys.argv[1])
