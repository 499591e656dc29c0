"""The report of `make chaos`: each fault with its effect on clients."""

import pytest

from bench.chaos.tally import Fault, Tally


@pytest.fixture
def tally():
    return Tally(faults=[Fault("replica", 10.0), Fault("ingress", 20.0), Fault("replica", 30.0)])


@pytest.mark.parametrize(
    ("begin", "end", "gaps"),
    [
        (5.0, 5.5, [0.5, 0, 0]),
        (8.0, 12.0, [4.0, 0, 0]),
        (12.0, 22.0, [0, 10.0, 0]),
        (12.0, 32.0, [0, 20.0, 0]),
        (31.0, 33.0, [0, 0, 2.0]),
    ],
)
def test_a_gap_belongs_to_the_first_fault_since_its_begin_or_to_the_last_before(
    tally, begin, end, gaps
):
    tally.note_gap(begin, end)
    assert [fault.gap_s for fault in tally.faults] == gaps


def test_the_longest_of_each_fault_is_kept_and_summed_up_for_its_kind(tally):
    for end in (12.0, 11.0):
        tally.note_gap(9.0, end)
    tally.note_gap(29.0, 30.5)
    tally.note_first(8.0, 15.0)
    tally.note_first(9.5, 10.5)
    tally.note_return(20.0, 21.0, streamed=True)
    tally.note_return(20.0, 25.0, streamed=False)
    rows = [line.split("  ") for line in tally.page().splitlines()]
    found = {
        row[0]: [each.strip() for each in row[1:] if each.strip()] for row in rows if len(row) > 2
    }
    assert found["replica"] == ["2", "2.2 / 2.9 / 3.0", "3.5 / 6.6 / 7.0", "-", "-"]
    assert found["ingress"] == ["1", *["0.0 / 0.0 / 0.0"] * 2, "1.0 / 1.0 / 1.0", "5.0 / 5.0 / 5.0"]


def test_a_kind_that_was_never_killed_is_a_failure_but_no_broken_stream(tally):
    tally.started = tally.finished = 3
    assert tally.passed
    tally.spared.append("encoder")
    assert not tally.passed and tally.broken == 0
    assert "encoder" in tally.page().splitlines()[-1]
    tally.spared.clear()
    tally.note_broken("cut")
    assert not tally.passed


def test_without_faults_nothing_is_attributed():
    tally = Tally()
    tally.note_gap(1.0, 2.0)
    tally.note_first(1.0, 2.0)
    tally.note_return(1.0, 2.0, streamed=True)
    assert "replica" not in tally.page()
