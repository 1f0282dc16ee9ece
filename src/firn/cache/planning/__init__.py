"""Decisions without effects.

    match.py        where a prompt can resume, given what is stored
    plan.py         what to resume from now, and what to load in the meantime
    reasons.py      why it did not get further
    checkpoints.py  at which positions a recurrent model's state is kept
    estimates.py    what computing and loading cost here; estimates_file.py keeps it across restarts

No arrays, no threads, and no files but that one. Used by `Loader`, `Restorer` and the prefix cache;
`Records` has the estimates.
"""
