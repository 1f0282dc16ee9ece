"""Several tokens a step: who drafts, and how many tokens are tried."""
