"""The simulation of what agreeing costs: its arithmetic, its table, a small run of each kind."""

import json

import pytest

from benchmarks import tp_simulation
from benchmarks.tp_simulation import Step, row_of

SMALL = ["--stages", "2", "--microbatches", "4", "--tp", "2", "--seeds", "1"]


def test_a_row_holds_medians_over_the_seeds() -> None:
    """The ratio is the median of the seeds' ratios, not the ratio of medians."""
    late = [Step(3.0, 0.2, 1.0), Step(2.0, 0.1, 3.0), Step(8.0, 0.6, 2.0)]
    punctual = [Step(2.0, 0.0, 0.0), Step(1.0, 0.0, 0.0), Step(8.0, 0.0, 0.0)]
    row = row_of((4, 50, 1, "leader"), late, punctual)
    assert (row.tp, row.control_us, row.skew_ms, row.protocol) == (4, 50, 1, "leader")
    assert (row.wait_share, row.retries_per_task) == (0.2, 2.0)
    assert (row.makespan_s, row.time_ratio) == (3.0, 1.5)


def test_json_has_a_row_for_every_setting_and_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    """Without delay and skew nothing is lost; a delay costs an all-gather more than a leader."""
    assert tp_simulation.main([*SMALL, "--control-us", "0,2000", "--skew-ms", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {(row["control_us"], row["protocol"]): row for row in rows}
    assert len(rows) == len(found) == 4
    for protocol in ("leader", "allgather"):
        row = found[0, protocol]
        assert (row["wait_share"], row["retries_per_task"], row["time_ratio"]) == (0.0, 0.0, 1.0)
    leader, allgather = found[2000, "leader"], found[2000, "allgather"]
    assert 0.0 < leader["wait_share"] < allgather["wait_share"]
    assert 1.0 < leader["time_ratio"] < allgather["time_ratio"]


def test_the_table_has_a_line_per_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Both protocols in it."""
    assert tp_simulation.main([*SMALL, "--control-us", "50,500", "--skew-ms", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("│ 2 ") for line in lines) == 2


@pytest.mark.parametrize(("option", "value"), [("--tp", "1"), ("--control-us", "-5")])
def test_bad_numbers_are_refused_by_name(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2; a group of one rank agrees on nothing."""
    with pytest.raises(SystemExit) as ended:
        tp_simulation.main([f"{option}={value}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert option in told
    assert repr(value) in told
