"""Environments of verifiers, by their names."""
