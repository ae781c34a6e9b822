"""Modules of Flax Linen and NNX as variables of a model_fn."""
