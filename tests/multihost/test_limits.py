"""The limits on the phases of a run; `test_deaths.py` has processes that hang."""

import re

import pytest

import estimator as est


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "30m", True])
def test_a_limit_is_a_positive_number_of_seconds(value):
    text = f"`step` of Limits should be a positive number of seconds, or None for no limit; got {value!r}."
    with pytest.raises(ValueError, match=re.escape(text)):
        est.Limits(step=value)


def test_limits_of_a_run_are_limits():
    text = "`limits` should be an `est.Limits`, say `RunConfig(limits=est.Limits(step=600))`, or None; got 30."
    with pytest.raises(ValueError, match=re.escape(text)):
        est.RunConfig(limits=30)
    assert est.RunConfig(limits=None).limits is None


def test_a_phase_has_its_own_limit_and_a_slow_step_ten_times_as_long():
    limits = est.Limits(input=60, step=100, end=None)
    assert [limits.secs(phase, 30.0) for phase in ("input", "step", "end", "output")] == [60, 300, *[float("inf")] * 2]
    assert limits.secs("step", 5.0) == 100 and limits.shortest() == 60
    assert est.Limits(*[None] * 7).shortest() == float("inf")
