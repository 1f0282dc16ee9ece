"""Grammars for replies: which texts are a valid answer or call. `models/grammar` compiles them.

`constraint` is the way in, for `api/calls`; parsers describe their formats with the rest.
"""
