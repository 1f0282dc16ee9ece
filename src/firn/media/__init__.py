"""Pictures and documents of requests: fetched, checked, decoded. Imports no mlx."""
