"""The routes beside the dialects' own, one file for each subject."""
