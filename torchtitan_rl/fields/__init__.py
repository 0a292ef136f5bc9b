"""Fields of a config: numbers with limits, options, references to a user's code."""
