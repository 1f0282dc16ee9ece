"""Benchmarks of any server that speaks OpenAI's chat API. Imports only the standard library, core and
traces."""
