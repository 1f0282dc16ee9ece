"""`firn bench`: for `commands` alone. The work is imported when the command runs."""
