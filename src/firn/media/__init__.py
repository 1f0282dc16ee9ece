"""Pictures and documents of requests: fetched, checked, decoded. No mlx."""
