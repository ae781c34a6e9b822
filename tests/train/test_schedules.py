"""Learning rate schedules: TensorFlow's numbers, and what is wrong is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, close
from testing.model_fns import predicting
from testing.towers import replicate, started

import estimator as est

CASES = GOLDEN["schedules"]


def rate_of(case, step):
    args = [step if arg == "step" else arg for arg in case["args"]]
    return getattr(est.train, case["name"])(*args, **case["kwargs"])


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{len(case['kwargs'])}")
def test_schedules_have_the_numbers_of_tensorflow(case):
    def at(step):
        return rate_of(case, step)

    steps = np.array(case["steps"], np.int32)
    close(jax.vmap(at)(steps), case["values"])
    np.testing.assert_array_equal(jax.jit(jax.vmap(at(None)))(steps), jax.jit(jax.vmap(at))(steps))


def test_schedules_have_the_numbers_of_tensorflow_in_4_towers():
    def rates(features):
        return jnp.tile(jnp.stack([rate_of(case, est.global_step()) for case in CASES]), (len(features), 1))

    batch = np.zeros(4, np.float32)
    model, state = started(replicate(predicting(rates), 4), batch, mode="infer")
    (steps,) = {tuple(case["steps"]) for case in CASES}
    for step, *values in zip(steps, *(case["values"] for case in CASES), strict=True):
        now = state._replace(global_step=jnp.asarray(step, state.global_step.dtype))
        close(model.predict_step(now, batch).predictions, [values] * 4)


def test_a_number_instead_of_the_step_is_an_error():
    """As in `optax.polynomial_schedule`'s order of TensorFlow's arguments, less the step."""
    with pytest.raises(TypeError, match=r"`est.train.polynomial_decay` needs `est.global_step\(\)`.*; got 1000\."):
        est.train.polynomial_decay(0.1, 1000, 1e-4)


def test_restarts_at_ever_shorter_intervals_come_to_an_end():
    rate = jax.vmap(est.train.cosine_decay_restarts(2.0, None, 10, t_mul=0.5, m_mul=0.5, alpha=0.25))
    # They restart in steps 10, 15 and 17.5, and end in step 20.
    half, full = 0.5 * (0.75 / 2) + 0.25, 0.75 + 0.25
    wanted = [2 * full, 2 * (0.75 / 2 + 0.25), 2 * half, 2 * (0.75 / 4 + 0.25), 0.5, 0.5, 0.5]
    close(rate(np.array([0, 10, 12.5, 15, 20, 21, 1000])), wanted)


@pytest.mark.parametrize("t_mul", [0, -0.5, np.nan])
def test_restarts_need_intervals_that_have_a_length(t_mul):
    with pytest.raises(ValueError, match=r"`est.train.cosine_decay_restarts` needs a t_mul larger than 0; got "):
        est.train.cosine_decay_restarts(0.1, None, 10, t_mul)


def test_piecewise_constant_needs_one_value_more():
    with pytest.raises(ValueError, match="one value more than boundaries; got 2 values and 2 boundaries"):
        est.train.piecewise_constant(None, [1, 2], [0.1, 0.2])
