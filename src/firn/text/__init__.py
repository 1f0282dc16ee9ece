"""Messages to prompts, and tokens to text, reasoning and tool calls. Pure: no mlx, no threads."""
