"""Several tokens a step: who drafts, and how many tokens are tried.

`assembly` builds a `Speculator`, and the steps in `decode` ask it. `mtp` is a model's own prediction
head, which `mtp_load` reads from its files.
"""
