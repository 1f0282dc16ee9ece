"""Decisions without effects: where a prompt can resume, what to load, which states to keep."""
