import pytest
from soak import damages


@pytest.mark.slow
def test_no_damage_of_a_checkpoint_gives_other_values():
    outcomes = damages.main(["--count", "6", "--seed", "1"])
    assert sum(outcomes.values()) == 12
    assert [outcome for *_, outcome in outcomes if outcome.startswith("BAD")] == []
