"""Records as bytes: packed, sealed, checked, and moved to and from tiers by I/O threads."""
