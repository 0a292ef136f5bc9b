"""Training as one reads it; READING.md says in which order."""
