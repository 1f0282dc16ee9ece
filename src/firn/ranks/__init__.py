"""The processes of one sharded model: how they find each other, speak, and end together."""
