"""The engine thread: a loop, a pure scheduler, sequences, a memory budget. Knows no mlx."""
