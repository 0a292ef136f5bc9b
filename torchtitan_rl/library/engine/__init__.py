"""Starts the vLLM engine that the generator samples with, and replaces parts of it."""
