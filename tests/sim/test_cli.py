"""The command line: what it prints, and what it says about bad input."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rrfp_async.cli import main
from rrfp_async.hints import FILES, HINTS
from tests.logs import dispatched
from tests.sim.event_simulation import gpipe
from tests.sim.tables import drawn, even, written

RESULT_KEYS = {
    "makespan_s",
    "speedup_vs_1f1b",
    "bound_s",
    "ratio_to_bound",
    "compute_s",
    "blocking_s",
    "blocking_fraction",
    "peak_in_flight",
    "tp_wait_share",
    "tp_retries",
    "wall_s",
}


BAD_OPTIONS = [
    (["--hint", "bff"], "hint 'bff' is not known"),
    (["--hint", ""], "hint '' is not known"),
    (["--profile", "gpt"], "profile 'gpt' is not known"),
    (["--jitter", "J9"], "jitter 'J9' is not known"),
    (["--limit", "0"], "--limit '0' must be"),
    (["--limit", "-1"], "--limit '-1' must be"),
    (["--limit", "many"], "--limit 'many' must be"),
    (["--limit", "1.5"], "--limit '1.5' must be"),
    (["--limit", ""], "--limit '' must be"),
    (["--delay", "-0.1"], "delay=-0.1 must be"),
    (["--delay", "nan"], "delay=nan must be"),
    (["--delay", "inf"], "delay=inf must be"),
    (["--dispatch-cost", "-0.1"], "-0.1 must be"),
    (["--dispatch-cost", "nan"], "nan must be"),
    (["--dispatch-cost", "inf"], "inf must be"),
    (["--tp", "0"], "tp=0 must be"),
    (["--tp", "-2"], "tp=-2 must be"),
    (["--dp", "0"], "dp=0 must be"),
    (["--tp-protocol", "vote"], "tp_protocol='vote' must be"),
    (["--control-delay", "-0.1"], "control delay -0.1 must be"),
    (["--control-delay", "nan"], "control delay nan must be"),
    (["--control-delay", "inf"], "control delay inf must be"),
    (["--skew", "-0.1"], "skew -0.1 must be"),
    (["--skew", "nan"], "skew nan must be"),
    (["--skew", "inf"], "skew inf must be"),
    (["--stages", "0"], "stages=0 must be"),
    (["--stages", "-3"], "stages=-3 must be"),
    (["--microbatches", "0"], "microbatches=0 must be"),
    (["--binding"], "hint 'auto' is a rule"),
    (["--hint", "bf", "--binding"], "hint 'bf' is a rule"),
    (["--hint", "csv:/nowhere/order.csv"], "/nowhere/order.csv' cannot be read"),
    (["--hint", "replay:/nowhere"], "cannot be read"),
    (["--costs", "/nowhere/costs.json"], "/nowhere/costs.json cannot be read"),
    (["--hint", "1f1b", "--binding", "--stages", "4", "--limit", "3"], "limit=3 is below 4"),
    (["--hint", "gpipe", "--binding", "--limit", "31"], "limit=31 is below 32"),
]


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


class Commands:
    """Runs commands, with files of the test's own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def run(self, *arguments: str) -> Ended:
        status = main(arguments)
        out, err = self._capsys.readouterr()
        return Ended(status, out, err)

    def simulate(self, *arguments: str) -> Any:
        """What `simulate --json` prints, for a run that goes well."""
        ended = self.run("simulate", *arguments, "--json")
        assert (ended.status, ended.err) == (0, "")
        return json.loads(ended.out)

    def costs(self, tables: object) -> str:
        return written(tables, self.folder / "costs.json")

    def csv(self, *rows: str) -> str:
        """A hint that reads `rows`, whose cells are parted by spaces."""
        path = self.folder / "order.csv"
        path.write_text("".join(row.replace(" ", ",") + "\n" for row in rows))
        return f"csv:{path}"

    def assert_refused(self, *arguments: str, saying: str) -> None:
        """Status 2, nothing on stdout, one line on stderr."""
        ended = self.run("simulate", *arguments, "--json")
        assert (ended.status, ended.out) == (2, ""), ended
        [line] = ended.err.splitlines()
        assert line.startswith("error: ")
        assert saying in line


@pytest.fixture
def commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, capsys)


def test_hints_are_listed_one_a_line(commands: Commands) -> None:
    """A line begins with what `hint=` takes and goes on with what it is."""
    ended = commands.run("hints")
    assert (ended.status, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines] == [*HINTS, *FILES]
    assert all(len(line.split()) > 3 for line in lines)


def test_json_has_exactly_the_keys_of_a_result(commands: Commands) -> None:
    """One object; one number per stage where it says so."""
    result = commands.simulate("--stages", "3", "--microbatches", "4", "--delay", "0.01")
    assert set(result) == RESULT_KEYS
    for name in ("compute_s", "blocking_s", "peak_in_flight"):
        assert len(result[name]) == 3
    assert 0.0 < result["ratio_to_bound"] <= 1.0
    assert result["ratio_to_bound"] == pytest.approx(result["bound_s"] / result["makespan_s"])
    lost_s = sum(result["blocking_s"]) / (3 * result["makespan_s"])
    assert result["blocking_fraction"] == pytest.approx(lost_s)


def test_without_json_the_same_is_shown_to_people(commands: Commands) -> None:
    """The sums, then a row per stage."""
    ended = commands.run("simulate", "--stages", "3", "--microbatches", "4")
    assert ended.status == 0
    shown = RESULT_KEYS - {"compute_s", "blocking_s", "peak_in_flight"}
    assert all(name in ended.out for name in shown)
    assert len(ended.out.splitlines()) == len(shown) + 1 + 3


def test_without_a_hint_it_simulates_the_automatic_one(commands: Commands) -> None:
    """The default is the library's: as `--hint auto`, and not as `bf`."""
    draw = ("--stages", "4", "--microbatches", "12", "--jitter", "J3")
    given = ((), ("--hint", "auto"), ("--hint", "bf"))
    none, auto, other = (commands.simulate(*draw, *hint)["makespan_s"] for hint in given)
    assert none == auto != other


def test_the_seed_decides_the_draw(commands: Commands) -> None:
    """The same again for the same, `wall_s` apart."""
    draw = ("--stages", "4", "--microbatches", "6", "--profile", "multimodal", "--jitter", "J3")
    results = [commands.simulate(*draw, "--seed", seed) for seed in ("1", "1", "2")]
    for result in results:
        del result["wall_s"]
    assert results[0] == results[1] != results[2]


def test_groups_and_replicas_have_a_number_for_each_of_their_ranks(commands: Commands) -> None:
    """The seed is the skew's too, also beside costs from a file; each replica draws its own."""
    sizes = ("--stages", "3", "--microbatches", "4", "--jitter", "J3", "--tp", "2", "--dp", "2")
    result = commands.simulate(*sizes)
    assert len(result["compute_s"]) == len(result["peak_in_flight"]) == 12
    assert result["compute_s"][0] == result["compute_s"][1] != result["compute_s"][2]
    assert (result["tp_wait_share"], result["tp_retries"]) == (0.0, 0)
    costs = ("--costs", commands.costs(even(3, 4)), "--tp", "2", "--skew", "0.5")
    spans = [commands.simulate(*costs, "--seed", seed)["makespan_s"] for seed in ("1", "1", "2")]
    assert spans[0] == spans[1] != spans[2]


def test_a_delay_of_control_messages_is_told_as_waiting(commands: Commands) -> None:
    """All-gather waits before every task, the leader hardly; one column agrees with nobody."""
    costs = ("--costs", commands.costs(even(3, 6)), "--control-delay", "0.125", "--hint", "bf")
    alone, leader, allgather = (
        commands.simulate(*costs, "--tp", tp, "--tp-protocol", protocol)
        for tp, protocol in (("1", "allgather"), ("2", "leader"), ("2", "allgather"))
    )
    assert alone["tp_wait_share"] == 0.0
    assert 0.0 < leader["tp_wait_share"] < allgather["tp_wait_share"]
    waited_s = allgather["tp_wait_share"] * allgather["makespan_s"]
    assert waited_s == pytest.approx(12 * 0.125)
    assert alone["makespan_s"] < leader["makespan_s"] < allgather["makespan_s"]


def test_a_replay_of_a_simulation_is_that_simulation(commands: Commands, tmp_path: Path) -> None:
    """Its log is a real log, read by the same reader."""
    costs = ("--costs", commands.costs(drawn(random.Random(5), 4, 7, "random")))
    first = commands.simulate(*costs, "--trace-dir", str(tmp_path / "first"), "--limit", "3")
    replay = ("--hint", f"replay:{tmp_path / 'first'}", "--trace-dir", str(tmp_path / "again"))
    again = commands.simulate(*costs, *replay)
    assert again["makespan_s"] == pytest.approx(first["makespan_s"], abs=1e-6)
    assert again["peak_in_flight"] == first["peak_in_flight"]
    for rank in range(4):
        assert dispatched(tmp_path / "first", rank) == dispatched(tmp_path / "again", rank)


@pytest.mark.parametrize(
    ("arguments", "saying"), BAD_OPTIONS, ids=[" ".join(given) for given, _ in BAD_OPTIONS]
)
def test_bad_options_end_with_status_2_and_one_line(
    arguments: list[str], saying: str, commands: Commands
) -> None:
    """What was seen, what is required."""
    commands.assert_refused(*arguments, saying=saying)


@pytest.mark.parametrize("option", ["--stages", "--microbatches", "--delay", "--seed"])
def test_what_is_no_number_ends_with_status_2(option: str, commands: Commands) -> None:
    """The parser says it in its own form."""
    ended = commands.run("simulate", option, "abc")
    assert (ended.status, ended.out) == (2, "")
    assert option in ended.err


@pytest.mark.parametrize(("option", "given"), [("--stages", "3"), ("--microbatches", "2")])
def test_sizes_that_the_costs_contradict_are_refused(
    option: str, given: str, commands: Commands
) -> None:
    """Those that they confirm are not."""
    costs = commands.costs(even(2, 3))
    commands.assert_refused("--costs", costs, option, given, saying=f"{option} {given}, but")
    commands.simulate("--costs", costs, "--stages", "2", "--microbatches", "3")


@pytest.mark.parametrize(
    "ignored",
    [["--profile", "multimodal"], ["--jitter", "J2"], ["--delay", "0.1"], ["--seed", "4"]],
    ids=" ".join,
)
def test_what_costs_leave_no_place_for_is_not_passed_over(
    ignored: list[str], commands: Commands
) -> None:
    """An ignored setting warns (CONVENTIONS), or is refused."""
    ended = commands.run("simulate", "--costs", commands.costs(even(2, 3)), *ignored, "--json")
    assert ignored[0].lstrip("-") in ended.err


@pytest.mark.parametrize(
    ("rows", "saying"),
    [
        (["0F0 0B0 0F1", "1F0 1B0 1F1 1B1"], "row 0: task 0B1 is missing"),
        (["0F0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "entry 1: task 0F0"),
        (["0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"], "entry 4: task 0F2"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 0B1"], "row 1, entry 3: task 0B1"),
        (["0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"], "1B0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "1F1"),
        (["0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1"], "row 0: 0B1 stands before 0B0"),
        (["0F0 0F1 0B0 0B1"], "1 lists for 2 ranks"),
        (["0F0 0F1 0X0 0B1", "1F0 1B0 1F1 1B1"], "row 0, cell 2"),
    ],
    ids=["missing", "doubled", "unknown", "not its own", "before F", "circle", "reversed", "rows",
         "no action"],
)  # fmt: skip
def test_a_list_that_cannot_be_executed_is_refused(
    rows: list[str], saying: str, commands: Commands
) -> None:
    """The first fault, with row, task and rule."""
    costs, hint = commands.costs(even(2, 2)), commands.csv(*rows)
    commands.assert_refused("--costs", costs, "--hint", hint, "--binding", saying=saying)


def test_a_reversed_list_runs_where_the_order_is_free(commands: Commands) -> None:
    """Or where it only ranks."""
    lists = [" ".join(f"{s}{k}{j}" for k, j in gpipe(3)[:3] + gpipe(3)[:2:-1]) for s in range(2)]
    arguments = ("--costs", commands.costs(even(2, 3)), "--hint", commands.csv(*lists))
    assert commands.simulate(*arguments, "--binding", "--free-order")["peak_in_flight"] == [3, 3]
    assert commands.simulate(*arguments, "--limit", "4")["peak_in_flight"] == [3, 3]
    commands.assert_refused(*arguments, "--binding", saying="0B2 stands before 0B1")


@pytest.mark.parametrize("microbatches", [2, 5])
def test_a_replay_of_another_number_of_microbatches_is_refused(
    microbatches: int, commands: Commands, tmp_path: Path
) -> None:
    """A log of three executed as it stands on two or five: a ValueError, so one line."""
    recorded = str(tmp_path / "log")
    commands.simulate("--stages", "2", "--microbatches", "3", "--trace-dir", recorded)
    sizes = ("--stages", "2", "--microbatches", str(microbatches))
    commands.assert_refused(*sizes, "--hint", f"replay:{recorded}", saying="rank0.jsonl")


def test_a_trace_folder_that_cannot_be_is_refused(commands: Commands, tmp_path: Path) -> None:
    """There is a file where the folder should be."""
    (tmp_path / "file").write_text("")
    commands.assert_refused("--trace-dir", str(tmp_path / "file"), saying="file")


@pytest.mark.parametrize("cost", [10**400, 1e308], ids=["10**400", "1e308"])
def test_costs_that_overflow_are_refused(cost: float, commands: Commands) -> None:
    """Not a traceback of OverflowError."""
    costs = commands.costs(even(2, 2, forward_s=cost))
    commands.assert_refused("--costs", costs, saying="")


def test_nothing_and_nonsense_show_the_usage(commands: Commands) -> None:
    """Status 2, as of any command."""
    for arguments in ([], ["simulate", "--bogus"], ["simul"]):
        ended = commands.run(*arguments)
        assert ended.status == 2
        assert "Usage" in ended.out + ended.err
    assert commands.run("--help").status == 0
