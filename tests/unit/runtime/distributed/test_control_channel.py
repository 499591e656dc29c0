"""Connections between ranks: messages, and the detection of lost ranks."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest

from runtime.distributed.control_channel import ControlChannel, RankZero
from runtime.errors import DoesNotFitError, EngineDeadError
from tests.patience import HANG_S

HOST = "127.0.0.1"


def all_gather(rank_zero: RankZero) -> list[ControlChannel]:
    """All ranks have joined, in an arbitrary order."""
    lines: list[ControlChannel] = []
    joining = threading.Thread(
        target=lambda: lines.extend(
            ControlChannel(rank_info) for rank_info in reversed(rank_zero.rank_infos)
        )
    )
    joining.start()
    rank_zero.wait_for_ranks()
    joining.join()
    return sorted(lines, key=lambda line: line.rank_info.rank)


def test_messages_reach_all_ranks_and_rank_0_receives_one_from_each(rank_zero) -> None:
    one, two = all_gather(rank_zero)
    assert rank_zero.machines == [HOST] * 3 and rank_zero.address == one.address == HOST
    rank_zero.send(b"\x01" * 100_000)
    rank_zero.send_json({"go": 3})
    for line in (one, two):
        assert line.receive() == b"\x01" * 100_000 and line.receive_json() == {"go": 3}
    two.send_json({"rank": "two"})
    one.send_json({"rank": "one"})
    assert [words["rank"] for words in rank_zero.receive_json()] == ["one", "two"]
    rank_zero.close()
    with pytest.raises(EOFError):
        one.receive()


def test_the_end_of_a_rank_is_detected_immediately(rank_zero) -> None:
    heard = threading.Event()
    rank_zero.watch = heard.set
    one, two = all_gather(rank_zero)
    rank_zero.check()
    two.close()
    assert heard.wait(HANG_S)
    with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
        rank_zero.check()
    with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
        rank_zero.receive_json()
    assert "Rank 2" in str(rank_zero.cause_of(RuntimeError("connection closed")))
    one.close()


def test_the_failure_of_a_rank_keeps_its_message(rank_zero) -> None:
    one, two = all_gather(rank_zero)
    one.fail(DoesNotFitError("It needs 5 bytes more."))
    with pytest.raises(DoesNotFitError, match=r"Rank 1 of 3: It needs 5 bytes more\."):
        rank_zero.receive_json()
    two.fail(ValueError("too late"))  # the first failure counts
    with pytest.raises(DoesNotFitError):
        rank_zero.check()


def test_messages_that_precede_a_failure_are_received() -> None:
    failed = threading.Event()
    with closing(RankZero(HOST, 2)) as rank_zero:
        rank_zero.watch = failed.set
        (other,) = all_gather(rank_zero)
        other.send_json({"joined": True})
        other.fail(DoesNotFitError("It needs 5 bytes more."))
        assert failed.wait(HANG_S)
        assert rank_zero.receive_json() == [{"joined": True}]
        with pytest.raises(DoesNotFitError, match="Rank 1 of 2"):
            rank_zero.receive_json()


def test_a_rank_that_reports_the_loss_of_another_is_not_blamed(rank_zero) -> None:
    one, two = all_gather(rank_zero)
    one.fail(RuntimeError("Connection closed by peer"))
    two.close()
    with pytest.raises(EngineDeadError, match="Rank 2 of 3 is gone"):
        rank_zero.receive_json()


def test_an_own_error_is_not_replaced(rank_zero) -> None:
    lines = all_gather(rank_zero)
    own = RuntimeError("my own")
    assert rank_zero.cause_of(own, wait_s=0.01) is own and len(lines) == 2


def test_a_failure_before_all_have_joined_ends_the_wait(rank_zero) -> None:
    threading.Timer(0.1, rank_zero.fail, [EngineDeadError("An actor has died.")]).start()
    with pytest.raises(EngineDeadError, match="An actor has died"):
        rank_zero.wait_for_ranks()


def test_closing_ends_the_wait_for_messages(rank_zero) -> None:
    lines = all_gather(rank_zero)
    threading.Timer(0.1, rank_zero.close).start()
    with pytest.raises(EngineDeadError, match="Rank 0 was closed"):
        rank_zero.receive_json()
    assert len(lines) == 2


def test_closing_is_not_a_failure(rank_zero) -> None:
    heard: list[int] = []
    rank_zero.watch = lambda: heard.append(1)
    lines = all_gather(rank_zero)
    rank_zero.close()
    rank_zero.fail(EngineDeadError("afterwards"))
    rank_zero.check()
    assert not heard and len(lines) == 2


def test_an_address_without_listener_is_named(rank_zero, monkeypatch) -> None:
    monkeypatch.setattr("runtime.distributed.control_channel._JOIN_S", 0.1)
    rank_info = rank_zero.rank_infos[1]
    rank_zero.close()
    with pytest.raises(EngineDeadError, match=rf"Rank 2 of 3 .* {HOST}:{rank_info.port}"):
        ControlChannel(replace(rank_info))
