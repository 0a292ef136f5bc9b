"""Runs the code that GPUs run on a machine without a GPU: a pretended CUDA device for torch, and vLLM's engine for CUDA.

docs/measured/gpu.md says what this proves and what it cannot.
"""
