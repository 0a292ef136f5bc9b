"""Sampling from the policy. Importing this package needs no vLLM; building a `Generator` does."""

from torchtitan_rl.sampling import SamplingConfig

__all__ = ["SamplingConfig"]
