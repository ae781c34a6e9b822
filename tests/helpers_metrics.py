"""A metric of a user's own, for the tests."""

import jax
import jax.numpy as jnp


@jax.tree_util.register_pytree_node_class
class Largest:
    """A metric of clu's protocol whose states do not merge by a sum."""

    def __init__(self, value):
        self.value = value

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)
