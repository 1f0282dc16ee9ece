"""Facts."""
UNBUILDABLE: dict[str, str] = {}
KNOWN_UPSTREAM: dict[str, str] = {}
