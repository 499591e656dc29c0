"""How many more pages of a group a sequence needs, for a step and until it is computed."""

from runtime.kv.page_group import FAR, PageGroup, PageOwner

# Positions of a running stream in steps that have not retired, the planned one included.
STREAM_IN_FLIGHT = 2


def missing(group: PageGroup, owner: PageOwner, end: int, page_tokens: int) -> range:
    """The indices of the pages that the owner lacks for positions up to `end`."""
    held = group.held.get(owner)
    if held is not None and held.pages:
        first = held.end
    else:
        first = group.kind.first_visible(owner.confirmed, owner.spans) // page_tokens
    return range(first, -(-group.kind.extent(end, owner.spans) // page_tokens))


def has_room(
    group: PageGroup, owner: PageOwner, end: int, in_flight: int, page_tokens: int
) -> bool:
    """Whether the group has the pages that the owner needs at once until it has computed the
    positions up to `end`, at most `in_flight` of them in a step. True if it is the only owner.

    Windows that have been full need a varying number of pages. The most that those of other owners
    need do not count as available: the owner would soon lose its pages to them.
    """
    if not group.shrinks:
        return len(missing(group, owner, end, page_tokens)) <= group.available
    others = (other for other, held in group.held.items() if held.begin and other is not owner)
    varying = sum(_growth(group, other, FAR, STREAM_IN_FLIGHT, page_tokens) for other in others)
    return _growth(group, owner, end, in_flight, page_tokens) <= group.available - varying


def _growth(group: PageGroup, owner: PageOwner, end: int, in_flight: int, page_tokens: int) -> int:
    """The most pages that the owner has at once, beyond those that only it has now: these serve
    again when they leave its window."""
    held = group.held.get(owner)
    own = sum(group.owners[page] == 1 for page in held.pages) if held is not None else 0
    window = group.kind.pages_at_once(
        owner.confirmed, end, in_flight=in_flight, page_tokens=page_tokens, images=owner.spans
    )
    most = max(0, min(window, len(group.owners)) - own)
    return min(most, len(missing(group, owner, end, page_tokens)))
