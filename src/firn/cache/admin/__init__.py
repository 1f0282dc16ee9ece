"""The cache as people see it.

    control.py    questions to a running cache: statistics, probes, pins, clearing
    browse.py     its tree, read in slices
    inventory.py  what a folder contains, with or without a server
    transfer.py   a prefix as one file, to be moved to another machine

The API's routes use the first two, which run on the engine thread between two steps; `firn cache`
uses the others.
"""
