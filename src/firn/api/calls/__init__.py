"""A call's way through the engine: its prompt and job, its events, its limits, and who watches it.

Dialects and routes start calls; `assembly` builds what they share.
"""
