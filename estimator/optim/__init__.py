"""Optimizers: what `minimize` returns is applied here, on dense and on sparse gradients."""
