"""Frozen models that score episodes: references, teachers, hints."""
