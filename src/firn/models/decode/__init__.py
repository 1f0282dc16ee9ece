"""Decoding: rows in groups, steps of one token or several, sampling, and the runner that drives them."""
