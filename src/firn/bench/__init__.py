"""Benchmarks of any server that speaks OpenAI's chat API. Nothing but the standard library and core."""
