"""What every other package speaks: values, events, errors, ports, keys. No mlx, nothing of ours."""
