"""The vocabulary that all other packages share.

    values/         frozen values: messages, requests, prompts, jobs, models
    ports/          the seams between packages
    events.py       what happens to a request: tokens from the engine, text to a dialect
    errors.py       every fault that firn names, with its HTTP status
    keys.py         the chained hash that names a block in every tier
    measure.py      how a quantity is learnt from measurements; prefill_speed.py: prefill, by depth
    memory_plan.py  how a machine's memory is divided
    ranks.py        calls between the processes of one sharded model
    bounds.py, duration.py, common_chunks.py   small rules that several packages share

Imports neither mlx nor any other package of firn.
"""
