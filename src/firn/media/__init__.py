"""Pictures of requests: fetched, decoded, made ready for the model. No mlx."""
