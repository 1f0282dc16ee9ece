"""The machine that firn runs on: its memory, other firn servers on it, macOS's and systemd's services.

Each module hides one thing behind a few calls, and imports nothing of ours but errors.
"""
