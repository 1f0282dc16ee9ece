"""The routes other than the dialects' own, one file per subject."""
