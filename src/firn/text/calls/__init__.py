"""Tool calls in the text of a reply: how they are read, in JSON, tags or Python.

For `parsers`, which has one file for each format, for `reply`, which runs them, and for
`prompt`, which writes calls for templates that cannot.
"""
