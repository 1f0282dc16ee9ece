"""Decoding: rows in groups, steps of one token or several, sampling, and the runner that drives them.

`assembly` builds the `Runner`; the engine drives it through its port. Backends shape its steps.
"""
