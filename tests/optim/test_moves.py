"""Features of a step that are a `Move`: variables that change after all updates, in one class of a user's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from testing.model_fns import ones
from testing.towers import cpus, started

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnitNorm:
    """Keeps variables at norm 1; the example of CONTRIBUTING."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def apply(self, before, after):
        return {name: after[name] / jnp.linalg.norm(after[name]) for name in self.names}


def model_fn(features, labels, mode):
    loss = jnp.mean((features @ ones("w", (3,)) - labels) ** 2)
    train_op = est.group(TowerOptimizer(optax.sgd(0.1)).minimize(loss), est.TrainOp(moves=(UnitNorm(("w",)),)))
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(1)


def projected_gradient_descent(w, steps):
    for _ in range(steps):
        w = w - 0.1 * jax.grad(lambda w: jnp.mean((X @ w - Y) ** 2))(w)
        w = w / jnp.linalg.norm(w)
    return w


def test_variables_move_after_the_updates_on_any_number_of_towers():
    model, state = started(replicate_model_fn(model_fn, devices=cpus(4)), X, Y)
    for _ in range(3):
        state, _ = model.train_step(state, X, Y)
    np.testing.assert_allclose(state.variables["w"], projected_gradient_descent(jnp.ones(3), 3), rtol=1e-5)


def test_a_step_that_is_skipped_moves_nothing():
    model, state = started(replicate_model_fn(model_fn, devices=cpus(2), on_nan="skip"), X, Y)
    after, spec = model.train_step(state, X, np.full_like(Y, np.nan))
    assert spec.train_op.skipped
    np.testing.assert_array_equal(after.variables["w"], np.ones(3))
