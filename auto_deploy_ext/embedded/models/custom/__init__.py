"""Model definitions that transformers does not have: the Eagle wrapper, drafters, and targets made exportable."""
