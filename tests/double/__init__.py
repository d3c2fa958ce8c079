"""A double of AutoDeploy's import surface, and how it is put on a path in place of the real package."""
