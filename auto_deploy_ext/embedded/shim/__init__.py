"""The interface between a pipeline's models and their cached sequences."""
