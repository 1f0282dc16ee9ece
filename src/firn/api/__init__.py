"""HTTP: sockets, sessions and dialects, all on the asyncio thread. No mlx."""
