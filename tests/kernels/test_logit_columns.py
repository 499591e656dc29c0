"""Logits of tokens that cannot occur."""

import pytest
import torch

from runtime.kernels.logit_columns import limit_columns, limit_columns_twin


@pytest.mark.parametrize("suppressed", [None, [], [2], [0, 4, 6]], ids=str)
@pytest.mark.parametrize(("known", "width"), [(7, 7), (5, 7), (7, 9), (4, 9)])
def test_unknown_and_suppressed_columns_are_impossible(
    known: int, width: int, suppressed: list[int] | None
) -> None:
    x = torch.randn(3, 12)[:, :7] if width == 7 else torch.randn(3, 7)
    before, listed = x.clone(), None
    if suppressed is not None:
        listed = torch.tensor(suppressed, dtype=torch.int64)
    got = limit_columns(x, known, width, listed)
    closed = {*range(known, width), *(suppressed or ())}
    opened = [column for column in range(width) if column not in closed]
    assert torch.equal(got[:, opened], before[:, opened]) and got.shape == (3, width)
    assert (got[:, sorted(closed)] == -torch.inf).all()
    assert torch.equal(got, limit_columns_twin(before.clone(), known, width, listed))
    assert (got.data_ptr() == x.data_ptr()) == (width == 7)


@pytest.mark.parametrize("column", [-8, 7])
def test_suppressed_columns_beyond_the_row_are_refused(column: int) -> None:
    with pytest.raises(IndexError):
        limit_columns(torch.ones(3, 7), 7, 7, torch.tensor([0, column]))
