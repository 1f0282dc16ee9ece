"""The routes other than the dialects' own, one file per subject, and their description.

`api/server` finds those that offer `ROUTES` (discovery), and puts them together with the others, as the
front of several models does with those that it has.
"""
