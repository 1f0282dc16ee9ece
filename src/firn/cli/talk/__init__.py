"""`firn chat`: for `commands` alone."""
