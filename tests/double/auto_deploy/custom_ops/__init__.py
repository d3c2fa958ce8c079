"""DOUBLE of AutoDeploy, for tests: see tests/double/tree.py."""
