"""The routes other than the dialects' own, one file per subject, and their description.

`api/server` and the front of several models put them together.
"""
