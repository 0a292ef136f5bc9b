"""The policy: built and sharded by torchtitan, scored without logits, updated from episodes."""
