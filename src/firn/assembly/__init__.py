"""Builds the parts of a server: model and runner, prefix cache and tiers, the memory plan.

The rules for combining them are here; `firn.app` only connects the parts. What a server can do besides
is found in `extras`; with whom it computes its model is its `Sharding` (sharding).
"""
