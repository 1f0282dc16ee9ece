"""Records below memory. From the engine thread down to a tier:

tier_set.py    all tiers together: which record goes where
index.py       keeps the tree in agreement with what tiers have
catalogue.py   how a record is described in a tier, and where in the tree it belongs
client.py      one tier as the engine thread uses it: orders, and events.py as they come back
io.py          one tier behind I/O threads: records to bytes and back
threads.py     the I/O threads and their queue
container.py   a record as bytes; places.py, seal.py: parts of that
faults.py      what can go wrong
"""
