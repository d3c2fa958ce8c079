"""Orchestrators in the style of AutoDeploy's Eagle wrapper, each with its own twist, and what they are proved with."""
