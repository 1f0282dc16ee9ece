"""`firn cache`: for `commands` alone. The other modules are imported when a command runs."""
