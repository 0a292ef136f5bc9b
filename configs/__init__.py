"""The registry: every public function in a module here returns a `Controller.Config` and is a `--config` name."""
