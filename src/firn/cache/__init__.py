"""The prefix cache keeps what a model has computed for a prompt, so that it is not computed again.

A prompt is cut into blocks. A record is one part of one block's state: pages, a window, or a state
(parts.py). The tree knows every record and where it is stored: in a row, in memory, in tiers.

What happens to a prefix, and where:

    looked up  cache.open makes a cursor; loading.py plans what to resume from and what to load
    restored   cursor.restore, or cursor.advance while the prompt is read: restore.py fills a row from
               records, or memory/parking.py hands over the previous turn's row
    committed  cursor.commit: commit.py cuts new blocks out of the row, records.py keeps them
    spilled    cache.tick: storage/ writes new records to tiers/, and collects what was read
    evicted    memory/eviction.py, when memory runs short; what a tier has can be loaded again

Read in this order:

    parts.py, layout.py  what a record of this model consists of
    tree/                nodes and records; eviction order; lifetimes. No arrays, no files
    prefix.py            what the engine calls: the cache, and a cursor for each request
    cursor.py            a request's four values: what it asks, is committed, is loaded, was reused
    planning/            decisions, pure: where to resume, what to load, which states to keep
    commit.py, copies.py row -> records; the copies of all rows of a step, computed together
    restore.py           records -> row
    loading.py           tiers -> memory, while the prompt is computed
    records.py           a record's life: kept, spilled, evicted, loaded again, forgotten
    memory/              which records are held as arrays; records that stay in rows; parked rows
    storage/             the engine's side of a tier; records as bytes; I/O threads; shared stores
    tiers/               where bytes are stored: ssd, s3, redis. One file each; only names and bytes
    codecs/, arrays/     layer caches <-> arrays <-> host bytes. The only users of MLX
    admin/               for people: statistics, pins, browsing; tools for a folder
    stats.py, off.py, garbage.py     counters; the disabled cache; garbage collection

The engine thread owns everything but the I/O threads and what they hold: bytes, never arrays. No
error reaches the engine: a fault is logged, counted, and becomes a miss. docs/ARCHITECTURE.md
follows a record from a row to a file and back, function by function.
"""
