"""For people: questions to a running cache, and tools for a folder that no server need use."""
