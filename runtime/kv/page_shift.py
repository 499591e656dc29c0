"""Moving the pages of a sequence when positions leave its full context.

Keys depend on their positions only by a rotation, so pages move to lower indices, and their keys
are rotated back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.kv.page_group import Held, KeyShift, PageCopy, PageGroup
from runtime.kv.spec import CacheKind


class Leaving(Protocol):
    """The positions [begin, end) that leave."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MovedPages:
    """What the next step must do before its rows: make `copies`, then `key_shifts`, and enter
    `pages` (group, index, page) in the page table."""

    pages: tuple[tuple[int, int, int], ...]
    copies: tuple[PageCopy, ...]
    key_shifts: tuple[KeyShift, ...]


def can_move(kinds: Sequence[CacheKind], cut: Leaving, length: int, *, page_tokens: int) -> bool:
    """Whether the pages of `length` positions can move, if keys can: all that later rows see is
    still there, as a whole number of pages lower.

    A row that sees a part of what it saw before the cut, and then what was before that, is refused,
    since it may be gone.
    """
    count = cut.end - cut.begin
    if count % page_tokens or any(kind.by_image or kind.by_sequence for kind in kinds):
        return False
    for kind in kinds:
        before, after = kind.first_visible(length), kind.first_visible(length - count)
        if before > 0 and (after < cut.begin or after + count < before):
            return False
    return True


def move_pages(
    groups: Sequence[PageGroup], owner: object, cut: Leaving, *, page_tokens: int
) -> MovedPages | None:
    """Drop the pages of the positions that leave, and move those behind. None, and no change, if
    pages that other sequences have, too, cannot be copied."""
    shared = [sum(1 for _ in _shared(group, owner, cut, page_tokens)) for group in groups]
    if any(count > group.available for count, group in zip(shared, groups, strict=True)):
        return None
    pages: list[tuple[int, int, int]] = []
    copies: list[PageCopy] = []
    shifts: list[KeyShift] = []
    for group in groups:
        (number,) = group.numbers
        held = group.held[owner]
        first, last, inside = _indices(cut, page_tokens)
        copies += _made_private(group, number, owner, cut, page_tokens)
        stay = held.pages[: max(0, first - held.begin)]
        gone = held.pages[len(stay) : max(0, last - held.begin)]
        moved = held.pages[len(stay) + len(gone) :]
        if inside and gone and held.begin <= first and moved:
            copies.append(PageCopy(number, gone[0], moved[0], cells=inside))
        begin = min(held.begin, max(first, held.begin - (last - first)))
        group.held[owner] = Held(begin, stay + moved, published=begin + len(stay))
        for page in gone:
            group.drop(page)
        at = begin + len(stay)
        pages += [(number, index, page) for index, page in enumerate(moved, at)]
        by = cut.begin - cut.end
        shifts += [
            KeyShift(number, page, inside if index == first else 0, by)
            for index, page in enumerate(moved, at)
        ]
    return MovedPages(tuple(pages), tuple(copies), tuple(shifts))


def _indices(cut: Leaving, page_tokens: int) -> tuple[int, int, int]:
    """The first page that leaves, the first that moves to its index, and how many cells of it are
    before the positions that leave."""
    first, inside = divmod(cut.begin, page_tokens)
    return first, first + (cut.end - cut.begin) // page_tokens, inside


def _shared(group: PageGroup, owner: object, cut: Leaving, page_tokens: int) -> Iterator[int]:
    """Places in the owner's list of the pages that move and that others have, too."""
    held = group.held[owner]
    _, last, _ = _indices(cut, page_tokens)
    for place in range(max(0, last - held.begin), len(held.pages)):
        if group.owners[held.pages[place]] > 1:
            yield place


def _made_private(
    group: PageGroup, number: int, owner: object, cut: Leaving, page_tokens: int
) -> list[PageCopy]:
    """Replace shared pages that move by copies, and take those that move out of the prefix
    cache."""
    held = group.held[owner]
    copies = []
    for place in list(_shared(group, owner, cut, page_tokens)):
        source, target = held.pages[place], group.take()
        copies.append(PageCopy(number, source, target))
        group.drop(source)
        held.pages[place] = target
    _, last, _ = _indices(cut, page_tokens)
    for page in held.pages[max(0, last - held.begin) :]:
        if page in group.key_of:
            group.forget(group.key_of[page])
    return copies
