"""Tool calls in the text of a reply: how they are read, in JSON, tags or Python.

For `parsers`, which has one file for each format, and for `reply`, which runs them.
"""
