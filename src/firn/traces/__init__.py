"""Traces: which requests came when, and which prefixes they shared. No text."""
