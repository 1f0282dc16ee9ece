"""`firn models` and `firn pull`: for `commands` alone. The work is imported when a command runs."""
