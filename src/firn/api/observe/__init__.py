"""What the server shows of itself: metrics, activity, the dashboard.

Served by `server` and the probes; calls only report to it.
"""
