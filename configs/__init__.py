"""The config registry: every public function in these modules returns a `RunConfig`, and its name is a `--config`."""
