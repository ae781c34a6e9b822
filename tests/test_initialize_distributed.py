"""Processes that get together, and those that cannot: real ones, which end by themselves."""

import re

from helpers_cluster import shared_cluster


def test_processes_meet_and_end_at_different_times():
    ended = shared_cluster().run("helpers_distributed.meet", processes=3)
    assert [process.code for process in ended] == [0, 0, 0]
    for i, process in enumerate(ended):
        assert f"process {i} of 3 devices 6" in process.lines
        assert process.lines[-1] == "end"
    table = [line for line in ended[0].lines if re.fullmatch(r"\d +\S+ +\d+ +0\.10\.\d+ .* 2 x cpu", line)]
    assert [line[0] for line in table] == ["0", "1", "2"]
    assert not any("python" in line for process in ended[1:] for line in process.lines)
