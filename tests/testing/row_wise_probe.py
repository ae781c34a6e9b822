"""What an optax transformation does to the rows of a table, tried out on a small one."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import optax

from estimator.optim._extra_args import call_update
from estimator.optim._row_wise import variable_of

UNTOUCHED, TOUCHED = 1, [0, 2, 3]  # of the four rows: the one without a gradient, and the others
COUNTS = (10**3, 10**4, 10**6)


class Rule(enum.Enum):
    """What becomes of a row."""

    EXACT = "it changes by its own gradient alone, and without one it stays as it is"
    MOMENTUM = "it changes by its own gradient alone, and without one it moves on, while its slots but momentum stay"
    ROW_WISE = "it may change without a gradient of its own"
    WHOLE = "it changes by what rows without a gradient hold, or by their number"


class Probe:
    """A transformation and a table, `words`, of four rows, beside a small array `w`."""

    def __init__(self, transformation):
        self.transformation = transformation
        self.random = np.random.default_rng(0)

    def draw(self, scale=1.0):
        words = np.float32(scale * self.random.normal(size=(4, 2)))
        w = np.float32(1e-3 * self.random.normal(size=2))  # small, so that a norm is the norm of the table
        return {"words": words, "w": w}

    def rule(self):
        with jax.numpy_dtype_promotion("standard"):
            values, history = self.draw(), [self.draw(), self.draw()]
            gradients = [self.draw(), self.draw(1e12)]  # of 1e12, which are clipped by whatever clips
            alone, left, left_but_traces, is_new = map(np.asarray, jax.jit(self.try_out)(values, history, gradients))
        if not alone.all():
            return Rule.WHOLE
        if left.all():
            return Rule.EXACT
        return Rule.MOMENTUM if left_but_traces.all() and left[is_new].all() else Rule.ROW_WISE

    def try_out(self, values, history, gradients):
        """What `try_step` says of each state and gradient, and whether the state is a new one."""
        new = used = self.transformation.init(values)
        states = [(new, True)]
        for earlier in history:
            _, used = self.update(earlier, used, values)
            states.append((used, False))
        states += [(at_count(state, n), is_new) for n in COUNTS for state, is_new in ((new, True), (used, False))]
        every_pair = jax.vmap(jax.vmap(self.try_step, (None, None, 0)), (None, 0, None), axis_size=len(states))
        results = every_pair(values, stacked([state for state, _ in states]), stacked(gradients))
        return [*results, jnp.array([is_new for _, is_new in states])]

    def try_step(self, values, state, gradients):
        """Whether the touched rows alone have the same update; the untouched row and its slots stay; and its slots
        but momentum do."""
        gradients = map_tables(lambda x: x.at[UNTOUCHED].set(0), gradients)
        steps, after = self.update(gradients, state, values)
        alone = self.update(touched(gradients), touched(state), touched(values))
        still = [jnp.zeros_like(x) for x in untouched(steps)]
        return [
            equal(touched((steps, after)), alone, 1e-5),
            equal(untouched(steps), still) & equal(untouched(state), untouched(after)),
            equal(untouched(without_traces(state)), untouched(without_traces(after))),
        ]

    def update(self, gradients, state, values):
        return call_update(self.transformation, gradients, state, values, {"value": jnp.ones(())})


def map_tables(fn, tree):
    """`fn` of the arrays of `words`, in variables or slots, that have rows as it has; the others stay."""

    def visit(path, x):
        is_table = variable_of(path, {"words": None, "w": None}) == "words" and jnp.ndim(x) == 2
        return fn(x) if is_table else x

    return jax.tree_util.tree_map_with_path(visit, tree)


def touched(tree):
    return map_tables(lambda x: x[jnp.array(TOUCHED)], tree)


def untouched(tree):
    rows = []
    map_tables(lambda x: rows.append(x[UNTOUCHED]), tree)
    return rows


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def equal(one, other, tolerance=0.0):
    close = jax.tree.map(lambda x, y: jnp.allclose(x, y, rtol=tolerance, atol=0, equal_nan=True), one, other)
    return jnp.array(jax.tree.leaves(close)).all()


def at_count(state, count):
    """The state with its counters set, to see what schedules do later."""

    def visit(x):
        is_counter = jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        return jnp.full_like(x, count) if is_counter else x

    return jax.tree.map(visit, state)


def without_traces(state):
    def is_trace(node):
        return isinstance(node, optax.TraceState)

    return jax.tree.map(lambda node: None if is_trace(node) else node, state, is_leaf=is_trace)
