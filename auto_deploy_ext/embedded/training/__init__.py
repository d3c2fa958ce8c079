"""Training of Eagle3 heads by on-policy distillation: what `auto-deploy-ext train-draft` does.

`target` runs the model that is to be sped up, `sampling` lets it write the text, `corpus` keeps that text and what the
target computes on it, `multi_step` and `loss` are the head's training forward, `trainer` the loop, `evaluate` measures
acceptance, `checkpoint` writes the head and `command` puts them together.
"""
