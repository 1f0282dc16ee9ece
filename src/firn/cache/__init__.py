"""The prefix cache: what a model has computed of a prompt, kept so that it is never computed again.

A prompt is cut into blocks. A record is one part of one block's state: pages, a window, or a state
(parts.py). The tree knows every record and where it lies: in a row, in memory, in tiers.

What happens to a prefix, and where:

    looked up  prefix.open makes a cursor; loading.py plans what to resume from and what to load
    restored   prefix.restore, or prefix.advance while the prompt is read: restore.py fills a row from
               records, or memory/parking.py hands over the row of the last turn
    committed  prefix.commit: commit.py cuts new blocks out of the row, records.py keeps them
    spilled    prefix.tick: storage/ writes new records to tiers/, and takes in what was read
    evicted    memory/eviction.py, when memory gets short; what a tier has can be loaded again

Read in this order:

    parts.py, layout.py  what a record of this model consists of
    tree/                nodes and records; order of eviction; lifetimes. Knows no arrays, no files
    prefix.py            what the engine calls: open, restore, advance, commit, fork, close_cursor, tick
    cursor.py            a request's place in the tree, and what it waits for
    planning/            decisions, pure: where to resume, what to load, which states to keep
    commit.py, copies.py row -> records; their copies, computed for all rows of a step at once
    restore.py           records -> row
    loading.py           tiers -> memory, while the prompt is computed
    records.py           a record's life: kept, spilled, evicted, loaded again, forgotten
    memory/              which records are held as arrays; rows that hold their own; parked rows
    storage/             the engine's side of a tier; records as bytes; I/O threads; shared stores
    tiers/               where bytes lie: ssd, s3, redis. One file each; knows names and bytes only
    codecs/, arrays/     layer caches <-> arrays <-> bytes of the host. The only users of MLX
    ranks/               the same tree over a model that is split over several processes
    admin/               for people: statistics, pins, browsing; tools for a folder
    stats.py, off.py, garbage.py     counters; no cache at all; Python's collector

The engine thread owns everything but the I/O threads and what they hold: bytes, never arrays. Nothing
raises into the engine: a fault is logged, counted, and becomes a miss. docs/ARCHITECTURE.md follows a
record from a row to a file and back, function by function.
"""
