"""The prefix cache of a sharded model: one tree, on rank 0, and on each rank its slices of the records.

    tree.py    MirroredTree: rank 0's tree, which keeps the other ranks in step
    mirror.py  Mirror: numbers rank 0's payloads, and tells the others how to make theirs
    worker.py  RankWorker: one tier of all ranks together; it has what all of them have
    slices.py  Slices: a follower's side; payloads by number, and its own tier

firn.ranks makes rank 0's parts, ranks/serve.py a follower's.
"""
