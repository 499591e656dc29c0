"""Moving the pages of a sequence when tokens are dropped from its full context.

Keys depend on their positions only by a rotation, so pages move to lower indices, and their keys
are rotated back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.engine.context_shift import ContextCut
from runtime.kv.cache_kinds import CacheKind
from runtime.kv.page_group import HeldPages, KeyShift, PageCopy, PageGroup, PageOwner


@dataclass(frozen=True, slots=True)
class MovedPages:
    """What the next step must do before its rows: make `copies`, then `key_shifts`, and enter
    `pages` (group, index, page) in the page table."""

    pages: tuple[tuple[int, int, int], ...]
    copies: tuple[PageCopy, ...]
    key_shifts: tuple[KeyShift, ...]


def can_move(kinds: Sequence[CacheKind], cut: ContextCut, length: int, *, page_tokens: int) -> bool:
    """Whether the pages of `length` positions can move, given that keys can: the positions move by
    a whole number of pages, and all positions that later rows see are still stored.

    A kind whose window moves back over positions that it no longer saw is refused, because their
    pages may have been released.
    """
    count = cut.count
    if count % page_tokens or any(kind.by_image or kind.by_sequence for kind in kinds):
        return False
    for kind in kinds:
        before, after = kind.first_visible(length), kind.first_visible(length - count)
        if before > 0 and (after < cut.begin or after + count < before):
            return False
    return True


def move_pages(
    groups: Sequence[PageGroup], owner: PageOwner, cut: ContextCut, *, page_tokens: int
) -> MovedPages | None:
    """Drop the pages of dropped positions and move the later ones. None, and no change, if there
    are too few free pages to copy pages shared with other sequences."""
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
        group.held[owner] = HeldPages(begin, stay + moved, published=begin + len(stay))
        for page in gone:
            group.drop(page)
        at = begin + len(stay)
        pages += [(number, index, page) for index, page in enumerate(moved, at)]
        by = -cut.count
        shifts += [
            KeyShift(number, page, inside if index == first else 0, by)
            for index, page in enumerate(moved, at)
        ]
    return MovedPages(tuple(pages), tuple(copies), tuple(shifts))


def _indices(cut: ContextCut, page_tokens: int) -> tuple[int, int, int]:
    """The index of the first page with dropped positions, the index of the page that replaces it,
    and how many cells of the first one precede the dropped positions."""
    first, inside = divmod(cut.begin, page_tokens)
    return first, first + cut.count // page_tokens, inside


def _shared(group: PageGroup, owner: PageOwner, cut: ContextCut, page_tokens: int) -> Iterator[int]:
    """Places in the owner's page list of moving pages that other sequences share."""
    held = group.held[owner]
    _, last, _ = _indices(cut, page_tokens)
    for place in range(max(0, last - held.begin), len(held.pages)):
        if group.owners[held.pages[place]] > 1:
            yield place


def _made_private(
    group: PageGroup, number: int, owner: PageOwner, cut: ContextCut, page_tokens: int
) -> list[PageCopy]:
    """Replace moving pages that are shared by copies, and remove the moving pages from the prefix
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
