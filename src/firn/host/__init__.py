"""The machine that firn runs on: its memory, other firn servers, launchd and systemd services.

Each module hides one thing behind a few calls, and imports nothing of firn but errors.
"""
