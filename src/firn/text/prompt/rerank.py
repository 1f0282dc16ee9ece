"""Models that rate how well a document answers a query, by the odds of "yes" against "no". Pure.

Qwen3-Reranker and similar models are chat models trained on one question. Instruction and query
come before the document, so all documents of a query share them as a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from firn.core.ports import Tokenizer
from firn.core.values import Chat, Message, Reasoning, Reranker, TextPart

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction that the models were trained with; a request may send its own."""
NO_THINKING = Reasoning(enabled=False)
NAMED = "rerank"


def detect_reranker(
    name: str, tokenizer: Tokenizer, score: Mapping[str, Any] | None
) -> Reranker | None:
    """Recognises a reranker by the token ids in its folder's score settings, or by its name."""
    if score is not None:
        yes, no = score.get("true_token_id"), score.get("false_token_id")
        if type(yes) is int and type(no) is int:
            return Reranker(yes, no)
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    if NAMED not in name.lower() or yes is None or no is None:
        return None
    return Reranker(yes, no)


def question(query: str, document: str, instruction: str = INSTRUCTION) -> Chat:
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return Chat(
        (Message("system", (TextPart(SYSTEM),)), Message("user", (TextPart(text),))),
        template_kwargs={"enable_thinking": False},
    )


def relevance(yes_logprob: float, no_logprob: float) -> float:
    """The probability of "yes", given that the answer is "yes" or "no"."""
    difference = max(min(no_logprob - yes_logprob, 700.0), -700.0)
    return 1.0 / (1.0 + math.exp(difference))
