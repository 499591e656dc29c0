"""The turns of a conversation, of which the oldest are left out where it exceeds a limit."""

from collections.abc import Sequence


def turn_starts(roles: Sequence[str]) -> list[int]:
    """Index of the first message of each turn, by the roles of all messages.

    A turn begins with a user's message; what precedes the first user belongs to its turn.
    """
    starts: list[int] = []
    asked = False
    for at, role in enumerate(roles):
        if role == "system":
            continue
        if role == "user" and not asked:
            starts.append(at)
        asked = role == "user"
    return [0, *starts[1:]]


def kept_from(start: int, roles: Sequence[str]) -> list[int]:
    """Indices of the messages without the turns before `start`; all system messages stay."""
    return [at for at, role in enumerate(roles) if at >= start or role == "system"]
