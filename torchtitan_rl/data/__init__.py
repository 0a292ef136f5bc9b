"""Data: what becomes a prompt."""
