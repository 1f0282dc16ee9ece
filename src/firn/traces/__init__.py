"""Traces: which requests arrived when, and which prefixes they shared. No text."""
