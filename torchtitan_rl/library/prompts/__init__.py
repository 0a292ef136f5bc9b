"""Prompts: rendering a task's examples with the chat template, and the resumable stream of training prompts."""
