"""Rows of hashed n-grams: the kernels against their twins and plain Python."""

import torch

from runtime.kernels import ngrams as kernels
from tests.kernels.native_kernels import require_native_kernels

END = 7
HASHES = kernels.NgramHashes(
    torch.tensor([23703573157769, 20109073645365, 8052911324071]),
    torch.tensor([101, 103, 107, 109]),
    torch.tensor([0, 101, 204, 311]),
    END,
)


def plain_rows(context: list[int]) -> list[int]:
    """Those of the last token of `context`, with integers of any size."""
    last, *before = reversed(context)
    before = [*before, END, END][:2]
    if before[0] == END:
        before[1] = END
    factors, found = HASHES.factors.tolist(), []
    for n in (1, 2):
        hashed = last * factors[0]
        for token, factor in zip(before[:n], factors[1:], strict=False):
            hashed ^= token * factor
        for head in (2 * n - 2, 2 * n - 1):
            found.append(hashed % int(HASHES.sizes[head]) + int(HASHES.offsets[head]))
    return found


def test_rows_are_those_of_the_hashed_tokens() -> None:
    """At the begin of a sequence, after the token that ends a context, and of large tokens."""
    require_native_kernels()
    sequence = [248319, 5, END, 6, 0, END, END, 131, 9]
    tokens = torch.tensor(sequence)
    columns = kernels.token_columns(tokens, 2)
    assert torch.equal(columns, kernels.token_columns_twin(tokens, 2))
    before = torch.stack([columns.roll(1, 0)[:, 0], columns.roll(2, 0)[:, 0]], dim=1)
    before[0], before[1, 1] = 0, 0
    found = kernels.ngram_rows(tokens, before.contiguous(), HASHES)
    assert torch.equal(found, kernels.ngram_rows_twin(tokens, before, HASHES))
    assert found.tolist() == [plain_rows(sequence[: n + 1]) for n in range(len(sequence))]
