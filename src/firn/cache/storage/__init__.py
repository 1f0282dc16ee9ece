"""Records below memory, from the engine thread down to a tier.

    tier_set.py      all tiers together: which record is written where
    index.py         keeps the tree consistent with what tiers have
    catalogue.py     how a record is described in a tier, and where in the tree it belongs
    client.py        one tier as the engine thread uses it: orders go out; events.py is what comes back
    pace.py          when a client may write while rows decode
    io.py            one tier behind I/O threads: records to bytes and back
    threads.py       the I/O threads and their queue
    container.py     a record as bytes; places.py and seal.py are parts of that
    store_search.py  what a shared store has of a prompt; store_io.py asks the store
    store_address.py parses the address of a shared store; spill_policy.py: which records it gets
    store_probe.py   tests a shared store, for `firn doctor`
    faults.py        what can go wrong; tally.py counts

`Records` calls the first three. Down to client.py everything runs on the engine thread; io.py hands
orders to the I/O threads.
"""
