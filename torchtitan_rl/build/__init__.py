"""From a command line to a run: the registry, validation, dry runs and resumes."""
