"""`firn service`: `commands` for the command line, `start` for what a supervisor runs."""
