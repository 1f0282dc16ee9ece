"""Sparse prefill: of a long uncached prompt only the part that matters is read, and the rest later.

    rules.py       what a request may ask for, and what the API tells
    prefill.py     who is scored, thinned, and read in full when; the engine's hook
    selection.py   which tokens are kept, by their scores
    scorer.py      the port that scores prompts; attention.py implements it with a small model
    thinned.py     the positions of what is kept
    placing.py     how a model is given tokens at those positions

assembly/extras/sparse.py gives it to a server. The core knows only that a prompt has `Positions`, and
that a model is shown its caches by its `ModelArguments`.
"""
