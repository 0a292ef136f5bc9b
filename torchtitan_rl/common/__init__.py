"""Small helpers of several rings that the core does not need: metrics of lists, and text that is safe to store."""
