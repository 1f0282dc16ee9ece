"""From a name to a model in memory: find the folder, recognise, check, fingerprint, load, describe.

`loader` is the way in. `assembly` loads models; the command line and the front only inspect folders.
"""
