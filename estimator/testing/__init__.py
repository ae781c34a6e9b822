"""Helpers for the tests of a model: several devices on a CPU, and the law that towers compute what one device does."""

from estimator.testing._simulate_devices import simulate_devices
from estimator.testing._towers_match import assert_towers_match_one_batch

__all__ = ["assert_towers_match_one_batch", "simulate_devices"]
