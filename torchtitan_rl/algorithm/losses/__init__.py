"""The losses: what is learned from an episode."""
