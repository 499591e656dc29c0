"""The album: one budget for the images of requests and for those that may come again."""

import random
from concurrent.futures import CancelledError

import pytest
import torch

from model_zoo.multimodal.image_cache import Album, Loan
from runtime.errors import OverloadedError, RequestError
from runtime.vision.encoder import PreparedImage


def image(number: int, nbytes: int = 40) -> PreparedImage:
    return PreparedImage(torch.zeros(nbytes // 4), (1, 1), bytes([number]), 1)


def put(loan: Loan, number: int, nbytes: int = 40) -> PreparedImage:
    loan.reserve(nbytes)
    return loan.add(bytes([number]), image(number, nbytes))


def test_files_room_to_come_and_images_are_counted_until_the_loan_is_closed() -> None:
    album = Album(budget_bytes=1000)
    loan = album.lend(100)
    loan.reserve(80)
    assert album.used_bytes == 180
    loan.add(b"a", image(1))
    assert album.used_bytes == 180
    loan.close()
    assert (album.used_bytes, album.held_bytes) == (0, 40)
    loan.close()
    assert (album.used_bytes, album.held_bytes) == (0, 40)


def test_an_image_that_was_here_before_is_found_and_counted_once() -> None:
    album = Album(budget_bytes=1000)
    first, second = album.lend(), album.lend()
    made = put(first, 1)
    assert second.find(b"\x01") is made and album.used_bytes == 40
    first.close()
    assert album.used_bytes == 40
    second.close()
    assert (album.used_bytes, album.held_bytes) == (0, 40)
    assert album.lend().find(b"\x01") is made
    assert album.used_bytes == 40
    assert album.lend().find(b"\x02") is None


def test_of_two_who_make_the_same_image_at_once_both_get_the_first_one() -> None:
    album = Album(budget_bytes=1000)
    one, other = album.lend(), album.lend()
    one.reserve(40)
    other.reserve(40)
    first = one.add(b"a", image(1))
    assert other.add(b"a", image(1)) is first
    assert album.used_bytes == 40
    one.close()
    other.close()
    assert (album.used_bytes, album.held_bytes) == (0, 40)


def test_images_that_nobody_has_make_room_the_longest_unused_first() -> None:
    album = Album(budget_bytes=120)
    for number in (1, 2, 3):
        loan = album.lend()
        put(loan, number)
        loan.close()
    again = album.lend()
    assert again.find(b"\x01") is not None  # now 2 is the longest unused
    put(again, 4)
    assert album.held_bytes == 120
    found = [album.lend().find(bytes([number])) is not None for number in (1, 2, 3, 4)]
    assert found == [True, False, True, True]


def test_what_others_have_is_told_as_busy_and_room_comes_back_with_them() -> None:
    album = Album(budget_bytes=100)
    other = album.lend(30)
    put(other, 1)
    loan = album.lend(20)
    with pytest.raises(OverloadedError, match="90 bytes; `image_memory_bytes` is 100"):
        loan.reserve(40)
    with pytest.raises(OverloadedError, match="no room for 11 more"):
        album.lend(11)
    other.close()
    put(loan, 2)


def test_what_no_request_may_take_is_a_fault_of_the_request_however_empty_it_is() -> None:
    album = Album(budget_bytes=100)
    with pytest.raises(RequestError, match="101 bytes, as files and as pixels; at most 100"):
        album.lend(101)
    loan = album.lend(50)
    put(loan, 1)
    with pytest.raises(RequestError, match="101 bytes"):
        loan.reserve(11)
    loan.close()
    assert album.used_bytes == 0


def test_a_refusal_takes_nothing_and_drops_nothing() -> None:
    album = Album(budget_bytes=120)
    kept = album.lend()
    put(kept, 1)
    kept.close()
    album.lend(70)
    with pytest.raises(OverloadedError):
        album.lend(60)
    assert (album.used_bytes, album.held_bytes) == (70, 110)


def test_a_thread_that_works_for_somebody_who_left_is_stopped_and_then_gives_back() -> None:
    album = Album(budget_bytes=1000)
    loan = album.lend(100)
    loan.begin_work()
    put(loan, 1)
    loan.reserve(40)
    loan.close()
    assert album.used_bytes == 180, "the thread still has it all"
    with pytest.raises(CancelledError):
        loan.add(b"b", image(2))
    with pytest.raises(CancelledError):
        loan.find(b"a")
    with pytest.raises(CancelledError):
        loan.reserve(1)
    loan.end_work()
    assert (album.used_bytes, album.held_bytes) == (0, 40)


def test_the_budget_holds_whatever_comes_and_nothing_is_lost() -> None:
    r = random.Random(7)
    album = Album(budget_bytes=400)
    loans: list[Loan] = []
    refused = 0
    for _ in range(5000):
        if loans and r.random() < 0.4:
            loans.pop(r.randrange(len(loans))).close()
            continue
        try:
            loans.append(album.lend(r.randrange(50)))
            for number in r.choices(range(12), k=r.randrange(4)):
                if loans[-1].find(bytes([number])) is None:
                    put(loans[-1], number, 4 * (1 + 5 * number))
        except (OverloadedError, RequestError):
            refused += 1
        assert album.used_bytes <= album.held_bytes <= 400
    for loan in loans:
        loan.close()
    assert refused > 100 and album.used_bytes == 0 and album.held_bytes > 0
