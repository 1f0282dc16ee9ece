"""One model in several processes: how they find each other, communicate, compute and end together.

`serve` starts rank 0, a server whose model is shared (leader_parts), or a follower. A server of one
model does not know of ranks: it has a `Sharding` (assembly/sharding).
group and runner have the model's slices, cache/ the slices of its records.
"""
