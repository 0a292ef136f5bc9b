"""The proof that the engine computes with the weights of the policy. Every push of weights is verified."""
