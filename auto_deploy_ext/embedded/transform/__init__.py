"""Transforms: their interface and registry, the optimizer that runs them, and the pipeline's library of them."""
