"""The prefix cache: records of what a model has computed, by content, in tiers."""
