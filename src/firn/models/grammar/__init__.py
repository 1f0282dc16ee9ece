"""From a grammar to a mask for every token: llguidance, and a process in which a grammar is tried first.

`assembly` builds the `Compiler`; the rows in `decode` apply its constraints.
"""
