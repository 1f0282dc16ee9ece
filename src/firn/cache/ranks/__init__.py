"""The prefix cache of a sharded model: one tree, on rank 0, and on each rank its slices."""
