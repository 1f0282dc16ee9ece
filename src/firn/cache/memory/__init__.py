"""Records as arrays.

    eviction.py  which records memory holds, under a limit
    rows.py      records that stay in the row that computed them
    parking.py   rows that have ended, and the turns that continue in them

All of it runs on the engine thread. `Records` drives the first two; commit and restore use parking.
"""
