"""Connections between ranks: what is told, and who is heard to be gone."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from runtime.distributed.control_channel import ControlChannel, RankZero
from runtime.errors import DoesNotFitError, EngineDeadError
from tests.patience import HANG_S

HOST = "127.0.0.1"


@pytest.fixture
def lead() -> Iterator[RankZero]:
    lead = RankZero(HOST, 3)
    yield lead
    lead.close()


def all_gather(lead: RankZero) -> list[ControlChannel]:
    """All seats taken, which they are in the order of nobody's asking."""
    lines: list[ControlChannel] = []
    joining = threading.Thread(
        target=lambda: lines.extend(
            ControlChannel(rank_info) for rank_info in reversed(lead.rank_infos)
        )
    )
    joining.start()
    lead.gather()
    joining.join()
    return sorted(lines, key=lambda line: line.rank_info.rank)


def test_all_hear_what_the_first_rank_says_and_it_hears_each_of_them(lead) -> None:
    one, two = all_gather(lead)
    assert lead.machines == [HOST] * 3 and lead.address == one.address == HOST
    lead.tell(b"\x01" * 100_000)
    lead.tell_words({"go": 3})
    for line in (one, two):
        assert line.received() == b"\x01" * 100_000 and line.received_words() == {"go": 3}
    two.tell_words({"rank": "two"})
    one.tell_words({"rank": "one"})
    assert [words["rank"] for words in lead.words()] == ["one", "two"]
    lead.close()
    with pytest.raises(EOFError):
        one.received()


def test_the_end_of_a_rank_is_heard_at_once(lead) -> None:
    heard = threading.Event()
    lead.watch = heard.set
    one, two = all_gather(lead)
    lead.check()
    two.close()
    assert heard.wait(HANG_S)
    with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
        lead.check()
    with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
        lead.words()
    assert "Rank 2" in str(lead.explained(RuntimeError("connection closed")))
    one.close()


def test_why_a_rank_ends_is_told_in_its_words(lead) -> None:
    one, two = all_gather(lead)
    one.fail(DoesNotFitError("It needs 5 bytes more."))
    with pytest.raises(DoesNotFitError, match=r"Rank 1 of 3: It needs 5 bytes more\."):
        lead.words()
    two.fail(ValueError("too late"))  # the first failure counts
    with pytest.raises(DoesNotFitError):
        lead.check()


def test_a_rank_that_complains_of_another_ones_end_is_not_blamed(lead) -> None:
    one, two = all_gather(lead)
    one.fail(RuntimeError("Connection closed by peer"))
    two.close()
    with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
        lead.words()


def test_an_error_of_ones_own_stays_what_it_is(lead) -> None:
    lines = all_gather(lead)
    own = RuntimeError("my own")
    assert lead.explained(own, wait_s=0.01) is own and len(lines) == 2


def test_a_failure_before_all_have_joined_ends_the_waiting(lead) -> None:
    threading.Timer(0.1, lead.fail, [EngineDeadError("An actor has died.")]).start()
    with pytest.raises(EngineDeadError, match="An actor has died"):
        lead.gather()


def test_closing_is_no_failure(lead) -> None:
    heard: list[int] = []
    lead.watch = lambda: heard.append(1)
    lines = all_gather(lead)
    lead.close()
    lead.fail(EngineDeadError("afterwards"))
    lead.check()
    assert not heard and len(lines) == 2


def test_a_place_where_nobody_waits_is_named(lead, monkeypatch) -> None:
    monkeypatch.setattr("runtime.distributed.control_channel._JOIN_S", 0.1)
    rank_info = lead.rank_infos[1]
    lead.close()
    with pytest.raises(EngineDeadError, match=rf"Rank 2 of 3 .* {HOST}:{rank_info.port}"):
        ControlChannel(replace(rank_info))
