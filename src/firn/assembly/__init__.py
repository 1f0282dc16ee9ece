"""Builds what a server consists of: model and runner, prefix cache and tiers, the memory plan.

The rules of what goes with what live here; `firn.app` only joins the parts.
"""
