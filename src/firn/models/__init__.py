"""The only package that knows mlx_lm and mlx_vlm: loading, running and sampling models."""
