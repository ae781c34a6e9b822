"""Explanation of one training step of a replicated model_fn, without running it.

This file is the table of contents; every name has its explanation where it is defined.
"""

from replicate.explain._explain import explain
from replicate.explain._explanation import Explanation, Home, Split, Transfer
from replicate.explain._hlo import Collective, collectives

__all__ = ["Collective", "Explanation", "Home", "Split", "Transfer", "collectives", "explain"]
