"""What the server shows of itself: metrics, activity, the dashboard.

`server`, the front and the probes serve it; calls only report to it.
"""
