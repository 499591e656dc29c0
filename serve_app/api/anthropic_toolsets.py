"""Toolsets of Anthropic's protocol: several tools of the client that one type declares."""

from dataclasses import dataclass
from typing import Any

Properties = dict[str, dict[str, Any]]
# Description, parameters, and the names of those that are required.
Member = tuple[str, Properties, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Toolset:
    """`name`: in calls. `members`: the tools by their names. `disabled`: those that a request must
    enable."""

    name: str
    members: dict[str, Member]
    disabled: frozenset[str] = frozenset()


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def integer(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


def integers(count: int, description: str) -> dict[str, Any]:
    length = {"minItems": count, "maxItems": count}
    return {"type": "array", "items": {"type": "integer"}, **length, "description": description}


def one_of(description: str, *values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values], "description": description}


# Parameters of the tools for screens, and these tools: description, parameters, required ones.
_POINT = integers(2, "The point (x, y) in pixels from the left and the upper edge.")
_KEYS = text("Keys that are held during the action, such as ctrl+shift.")
_AT: Properties = {"coordinate": _POINT, "text": _KEYS}
_SECONDS: Properties = {"duration": integer("Seconds.")}
SCREEN_TOOLS: dict[str, Member] = {
    "key": (
        "Press a key, or several at once, such as ctrl+s, alt+Tab, Return or Page_Down.",
        {"text": text("The keys."), "repeat": integer("How often; by default once.")},
        ("text",),
    ),
    "hold_key": (
        "Hold down a key for some time.",
        {"text": text("The keys."), **_SECONDS},
        ("text", "duration"),
    ),
    "type": ("Type a text.", {"text": text("The text.")}, ("text",)),
    "cursor_position": ("Get the coordinates of the cursor.", {}, ()),
    "mouse_move": ("Move the cursor without a click.", {"coordinate": _POINT}, ("coordinate",)),
    "left_mouse_down": ("Press the left button and hold it.", {}, ()),
    "left_mouse_up": ("Release the left button.", {}, ()),
    "left_click": ("Click with the left button, at the cursor or at a point.", _AT, ()),
    "left_click_drag": (
        "Drag with the left button from one point to another.",
        {
            "start_coordinate": integers(2, "The point (x, y) where it begins."),
            "coordinate": integers(2, "The point (x, y) where it ends."),
            "text": _KEYS,
        },
        ("start_coordinate", "coordinate"),
    ),
    "right_click": ("Click with the right button, at the cursor or at a point.", _AT, ()),
    "middle_click": ("Click with the middle button, at the cursor or at a point.", _AT, ()),
    "double_click": ("Click twice, at the cursor or at a point.", _AT, ()),
    "triple_click": ("Click three times, at the cursor or at a point.", _AT, ()),
    "scroll": (
        "Turn the wheel, at the cursor or at a point.",
        {
            "scroll_direction": one_of("Where to.", "up", "down", "left", "right"),
            "scroll_amount": integer("By how many steps."),
            **_AT,
        },
        ("scroll_direction", "scroll_amount"),
    ),
    "wait": ("Wait for some time.", _SECONDS, ("duration",)),
    "screenshot": ("Get a picture of the screen.", {}, ()),
    "zoom": (
        "Get an enlarged picture of a part of the screen.",
        {"region": integers(4, "The corners (x0, y0, x1, y1) in pixels of the screen.")},
        ("region",),
    ),
}

# Parameters of the tools for browsers, and these tools.
_POINT_TARGET = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["coordinate"]},
        "x": integer("Pixels from the left edge of the page's visible part."),
        "y": integer("Pixels from its upper edge."),
    },
    "required": ["type", "x", "y"],
    "additionalProperties": False,
}
_ELEMENT = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["ref"]},
        "ref": text("An element by its reference, such as ref_7, from `read_page` or `find`."),
    },
    "required": ["type", "ref"],
    "additionalProperties": False,
}
_TAB: Properties = {"tab_id": text("The tab; by default the active one.")}
_PLACE: Properties = {"target": {"anyOf": [_POINT_TARGET, _ELEMENT]}, **_TAB}
_CLICK: Properties = {
    **_PLACE,
    "modifiers": text("Keys that are held during the action, such as ctrl+shift."),
}
_TARGET = ("target",)
_AT_POINT: Properties = {"target": _POINT_TARGET, **_TAB}
_AT_ELEMENT: Properties = {"target": _ELEMENT, **_TAB}
_DURATION = {"type": "number", "description": "Seconds, at most 30."}
_PRESSED = text("Keys, such as ctrl+a, or several presses with spaces between them.")
_BROWSER_TOOLS: dict[str, Member] = {
    "navigate": (
        "Open an address.",
        {"url": text("The address, or back, forward or reload."), **_TAB},
        ("url",),
    ),
    "list_tabs": ("Get all tabs with ids, titles and addresses.", {}, ()),
    "new_tab": ("Open an empty tab and get its id.", {}, ()),
    "switch_tab": ("Make a tab the active one.", _TAB, ("tab_id",)),
    "close_tab": ("Close a tab.", _TAB, ("tab_id",)),
    "read_page": (
        "Get the elements of the page as a tree, with references for other actions.",
        {
            "filter": one_of("Only some; by default all that are visible.", "all", "interactive"),
            "depth": integer("Levels of the tree; by default 15."),
            "ref": text("The element at whose tree to begin."),
            **_TAB,
        },
        (),
    ),
    "get_page_text": ("Get the text of the page.", _TAB, ()),
    "read_console": ("Get the new messages of the console.", _TAB, ()),
    "read_network": ("Get the new requests of the page.", _TAB, ()),
    "find": (
        "Find elements by a description in words and get their references.",
        {"query": text("What to find."), **_TAB},
        ("query",),
    ),
    "form_input": (
        "Set the value of an element of a form.",
        {
            "value": {
                "anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}],
                "description": "The value; of a checkbox true or false.",
            },
            **_AT_ELEMENT,
        },
        ("target", "value"),
    ),
    "file_upload": (
        "Choose files for an element of a form, by paths or by ids.",
        {
            "paths": {"type": "array", "items": {"type": "string"}},
            "document_ids": {"type": "array", "items": {"type": "string"}},
            **_AT_ELEMENT,
        },
        _TARGET,
    ),
    "scroll_to": ("Scroll until an element is visible.", _AT_ELEMENT, _TARGET),
    "screenshot": ("Get a picture of the visible part of the page.", _TAB, ()),
    "zoom": (
        "Get an enlarged picture of a region of the page.",
        {"region": integers(4, "The corners (x0, y0, x1, y1) in pixels."), **_TAB},
        ("region",),
    ),
    "left_click": ("Click at a point or on an element.", _CLICK, _TARGET),
    "right_click": ("Click with the right button.", _CLICK, _TARGET),
    "middle_click": ("Click with the middle button.", _CLICK, _TARGET),
    "double_click": ("Click twice.", _CLICK, _TARGET),
    "triple_click": ("Click three times, which selects a line or a paragraph.", _CLICK, _TARGET),
    "hover": ("Move the cursor to a point or an element.", _PLACE, _TARGET),
    "left_click_drag": (
        "Drag from one point to another.",
        {"from": _POINT_TARGET, **_AT_POINT},
        ("from", "target"),
    ),
    "left_mouse_down": ("Press the left button and hold it.", _AT_POINT, _TARGET),
    "left_mouse_up": ("Release the left button.", _AT_POINT, _TARGET),
    "mouse_move": ("Move the cursor to a point.", _AT_POINT, _TARGET),
    "scroll": (
        "Turn the wheel at a point.",
        {
            "scroll_direction": one_of("Where to.", "up", "down", "left", "right"),
            "scroll_amount": integer("By how many steps; by default 3."),
            **_AT_POINT,
        },
        ("scroll_direction", "target"),
    ),
    "type": ("Type a text where the focus is.", {"text": text("The text."), **_TAB}, ("text",)),
    "key": (
        "Press keys.",
        {"text": _PRESSED, "repeat": integer("How often; by default once."), **_TAB},
        ("text",),
    ),
    "hold_key": (
        "Hold down a key for some time.",
        {"text": _PRESSED, "duration": _DURATION, **_TAB},
        ("text", "duration"),
    ),
    "wait": ("Wait for some time.", {"duration": _DURATION, **_TAB}, ("duration",)),
    "javascript_exec": (
        "Run JavaScript in the page and get the value of its last expression.",
        {"text": text("The code, without return."), **_TAB},
        ("text",),
    ),
}

# By type.
TOOLSETS = {
    "computer_toolset_20260801": Toolset("computer", SCREEN_TOOLS),
    "browser_toolset_20260801": Toolset(
        "browser",
        _BROWSER_TOOLS,
        frozenset({"file_upload", "read_console", "read_network", "javascript_exec"}),
    ),
}
