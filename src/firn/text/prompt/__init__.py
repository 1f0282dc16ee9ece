"""From messages to a prompt's tokens: arrange, render, tokenize, mark where messages end.

`PromptMaker` (maker) is the way in; `assembly` builds it from what a template can do. Dialects join
adjacent texts here (joined_parts), and a route asks models that score documents (rerank).
"""
