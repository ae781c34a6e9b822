"""The programs of a first state: several where many initial values are drawn alike, with the values of one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing

import estimator as est
from estimator.steps import _init_programs

X = jnp.ones((4, 3))
normal = jax.nn.initializers.normal()


def loss_of_many(features, labels):
    """A loss of variables with all kinds of initial values: drawn alike, or alike but for an array; read by others."""
    tables = [np.full((3, 2), i, np.float32) for i in range(3)]
    values = [est.get_variable(f"glorot{i}", (3, 2)) for i in range(3)]
    values += [est.get_variable(f"normal{i}", (3, 2), initializer=normal) for i in range(3)]
    values += [est.get_variable(f"half{i}", (3, 2), jnp.bfloat16, normal).astype(jnp.float32) for i in range(3)]
    for i, table in enumerate(tables):
        around = lambda *args, table=table: table + normal(*args)  # noqa: E731
        values.append(est.get_variable(f"table{i}", (3, 2), initializer=around))
        values.append(est.get_variable(f"tied{i}", (3, 2), initializer=lambda *_, i=i: 2 * values[i]))
        values.append(est.get_variable(f"tree{i}", initializer=lambda key: {"a": normal(key, (3, 2))})["a"])
    return sum(jnp.sum((features @ value) ** 2) for value in values)


def first_state(fewest, monkeypatch):
    monkeypatch.setattr(_init_programs, "_FEWEST_ALIKE", fewest)
    slots_begin_as_variables = optax.GradientTransformation(lambda variables: variables, lambda g, slots, _: (g, slots))
    model = est.transform(minimizing(loss_of_many, slots_begin_as_variables), donate=True)
    state = model.init(jax.random.key(3), X)
    kept = jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))
    if fewest < 99:
        model.train_step(state, X)  # no array of it is there twice, which could not be given away
    return kept


@pytest.mark.slow
def test_values_that_are_drawn_apart_are_those_of_one_program(monkeypatch):
    one, several = (first_state(fewest, monkeypatch) for fewest in (99, 3))
    assert jax.tree.structure(one) == jax.tree.structure(several)
    jax.tree.map(np.testing.assert_array_equal, one, several)
    variables = several.variables
    assert len({np.asarray(value).tobytes() for name, value in variables.items() if "tree" not in name}) == 15


@pytest.mark.parametrize(("variables", "programs"), [(2, 1), (3, 2), (9, 2)])
def test_values_that_are_drawn_alike_are_one_program(compilations, variables, programs):
    def loss_of(features, labels):
        he_normal = jax.nn.initializers.he_normal
        return sum(jnp.sum(est.get_variable(f"w{i}", (5, 7), initializer=he_normal())) for i in range(variables))

    model = est.transform(minimizing(loss_of))
    model.abstract_init(X)
    before = len(compilations)
    model.init(jax.random.key(0), X)
    assert len(compilations) == before + programs
