"""A model whose weights are spread over several processes (ranks), each with a slice of every layer."""
