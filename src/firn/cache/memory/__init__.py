"""Records as arrays in memory: in arrays of their own, or in the row that computed them."""
