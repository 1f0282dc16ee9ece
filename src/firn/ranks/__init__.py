"""One model in several processes: how they find each other, communicate, compute and end together.

`assembly` and `app` build rank 0's parts (leader_parts) or a follower; nothing else knows of ranks.
group and runner have the model's slices, cache/ the slices of its records.
"""
