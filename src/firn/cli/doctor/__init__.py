"""`firn doctor`: for `commands`, and for `serve`, which warns of the same findings."""
