"""The registry: every public function in a module here returns a `RunConfig` and is a `--config` name."""
