"""Scorers: reward functions with TRL's signature and their logging, and the task's own judgement."""
