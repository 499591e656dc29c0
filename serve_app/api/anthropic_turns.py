"""Turns of Anthropic's conversations, and what system messages in them change: effort and tools."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from runtime.errors import RequestError
from serve_app.api.anthropic_blocks import BLOCK, blocks_of, is_summary, messages_of, one_of
from serve_app.api.anthropic_tools import DeclaredTool, OfferedTool
from serve_app.api.content_parts import check_type, string
from serve_app.api.fields import Body, Items, Objects, parsed
from serve_app.api.request_images import UnreadMessage

# As in Ollama, "xhigh" means the same as "high".
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "max"}


class TurnSettings(Body):
    effort: str | None = None


class Turn(Body):
    """A message of a user, the assistant or the operator (`system`). The fields after `content` are
    those of system messages."""

    role: str
    content: Annotated[str | Items[Any] | None, Objects(BLOCK)] = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnSettings | None = None

    @property
    def blocks(self) -> list[Any]:
        return blocks_of(self.content or "")


def unread_messages_of(turns: Sequence[Turn]) -> list[UnreadMessage]:
    """The messages of the turns, without those before a summary of them, and without system
    messages that a later user message clears."""
    last = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    found: list[UnreadMessage] = []
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        if turn.role == "assistant" and any(map(is_summary, turn.blocks)):
            found = []
        if turn.content is None and turn.role != "system":
            raise RequestError(f'field "{place}.content" is required')
        if turn.clear_at != "next_user_message" or turn.role != "system" or index > last:
            found += messages_of(place, turn.role, turn.content or "")
    return found


def effort_of(turns: Sequence[Turn]) -> str | None:
    """The effort that system messages set for the reply; None if they set none. One directly after
    new input of the user applies at once, others from the next new input on. Results of tools are
    no new input."""
    effort = following = None
    directly = False  # whether only system messages follow the new input
    for index, turn in enumerate(turns):
        if turn.role != "system":
            directly = turn.role == "user" and _has_input(turn)
            if directly and following is not None:
                effort, following = following, None
        elif turn.output_config is not None and turn.output_config.effort is not None:
            place = f"messages[{index}].output_config.effort"
            given = EFFORTS[one_of(place, turn.output_config.effort, EFFORTS)]
            effort, following = (given, None) if directly else (effort, given)
    return effort


def offered_tools(declared: Sequence[DeclaredTool], turns: Sequence[Turn]) -> list[OfferedTool]:
    """The tools that the model may call: the declared ones, as the blocks `tool_addition` and
    `tool_removal` of system messages change them. Raises RequestError that names the field."""
    known = {tool.name for tool in declared}
    added: dict[str | None, OfferedTool] = {}
    withdrawn: set[str | None] = set()
    for place, block in _changes(turns):
        tool, adds = block.get("tool"), block["type"] == "tool_addition"
        check_type(f"{place}.tool", tool, ("tool_reference", *(("tool_definition",) * adds)))
        assert isinstance(tool, dict)
        if tool["type"] == "tool_definition":
            found = _defined(f"{place}.tool.definition", tool.get("definition"))
            name = found.tool.name
            added.pop(name, None)  # the newest is the last
            added[name] = found
        else:
            name = string(f"{place}.tool", tool, "name")
            if name not in known and name not in added:
                raise RequestError(
                    f'field "{place}.tool.name" names the tool "{name[:80]}", which is not declared'
                )
        withdrawn.discard(name) if adds else withdrawn.add(name)
    first = [OfferedTool(f"tools[{index}]", tool) for index, tool in enumerate(declared)]
    every = [*(each for each in first if each.tool.name not in added), *added.values()]
    return [each for each in every if each.tool.name not in withdrawn]


def _defined(place: str, definition: Any) -> OfferedTool:
    tool = parsed(DeclaredTool, place, definition)
    if tool.name is None:
        raise RequestError(f'field "{place}.name" is required')
    return OfferedTool(place, tool)


def _changes(turns: Sequence[Turn]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The blocks that add or remove a tool, with their places; a summary has those before it."""
    for index, turn in enumerate(turns):
        for at, block in enumerate(turn.blocks):
            place = f"messages[{index}].content[{at}]"
            if turn.role == "system" and _is_change(block):
                yield place, block
            elif turn.role == "assistant" and is_summary(block):
                changes = block.get("tool_changes")
                for number, change in enumerate(changes if isinstance(changes, list) else ()):
                    if _is_change(change):
                        yield f"{place}.tool_changes[{number}]", change


def _is_change(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in ("tool_addition", "tool_removal")


def _has_input(turn: Turn) -> bool:
    return any(
        not isinstance(block, dict) or block.get("type") != "tool_result" for block in turn.blocks
    )
