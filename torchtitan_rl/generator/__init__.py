"""Sampling from the policy. Importing this package needs no vLLM; building a `Generator` does."""
