"""YAML configs: `plugin/` for AutoDeploy, `embedded/` for the embedded host."""
