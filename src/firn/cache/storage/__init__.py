"""Records below memory, from the engine thread down to a tier.

    desk.py          the engine's side of all tiers: which record is written where, what became of it;
                     spill.py: when it is handed over; held.py, pace.py: parts of that
    index.py         keeps the tree consistent with what tiers have
    catalogue.py     how a record is described in a tier, and where in the tree it belongs
    orders.py        what the desk submits and polls: plain values
    worker.py        one tier behind I/O threads: orders in, outcomes out
    tier_records.py  the records on a tier: packed, sealed, verified, deleted
    container.py     a record as bytes; places.py and seal.py are parts of that
    store_search.py  what a shared store has of a prompt
    store_address.py parses the address of a shared store; spill_policy.py: which records it gets
    store_probe.py   tests a shared store, for `firn doctor`
    faults.py        what can go wrong; tally.py counts

`Records` calls the first three, on the engine thread. A worker's threads do what is ordered; nothing but
orders and outcomes passes between them.
"""
