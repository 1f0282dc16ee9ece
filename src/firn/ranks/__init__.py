"""The processes of one sharded model: how they find each other, communicate, and end together."""
