"""Toolsets of Anthropic's protocol: several tools of the client that one type declares."""

from dataclasses import dataclass
from typing import Any

Properties = dict[str, dict[str, Any]]
# Description, parameters, and the names of those that are required.
Member = tuple[str, Properties, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Toolset:
    """`name`: of the set, in calls. `members`: its tools by name. `disabled`: those that are off
    unless the request enables them."""

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


# Tools for screens, and the parameters that several of them share.
_POINT = integers(2, "The point (x, y), in pixels from the left and top edges.")
_REGION = integers(4, "Its top left and bottom right corner (x0, y0, x1, y1), in pixels.")
_KEYS = text("Keys to hold down during the action, such as ctrl+shift.")
_AT: Properties = {"coordinate": _POINT, "text": _KEYS}
_SECONDS: Properties = {"duration": integer("Seconds.")}
SCREEN_TOOLS: dict[str, Member] = {
    "key": (
        "Press a key or a combination of keys, such as ctrl+s, alt+Tab, Return or Page_Down.",
        {"text": text("The keys."), "repeat": integer("How many times; 1 by default.")},
        ("text",),
    ),
    "hold_key": (
        "Hold down keys for a number of seconds.",
        {"text": text("The keys."), **_SECONDS},
        ("text", "duration"),
    ),
    "type": ("Type text.", {"text": text("The text.")}, ("text",)),
    "cursor_position": ("Get the coordinates of the cursor.", {}, ()),
    "mouse_move": ("Move the cursor without clicking.", {"coordinate": _POINT}, ("coordinate",)),
    "left_mouse_down": ("Press the left mouse button and hold it down.", {}, ()),
    "left_mouse_up": ("Release the left mouse button.", {}, ()),
    "left_click": ("Left-click at the cursor or at a point.", _AT, ()),
    "left_click_drag": (
        "Drag with the left mouse button from one point to another.",
        {
            "start_coordinate": integers(2, "The point (x, y) where the drag starts."),
            "coordinate": integers(2, "The point (x, y) where the drag ends."),
            "text": _KEYS,
        },
        ("start_coordinate", "coordinate"),
    ),
    "right_click": ("Right-click at the cursor or at a point.", _AT, ()),
    "middle_click": ("Middle-click at the cursor or at a point.", _AT, ()),
    "double_click": ("Double-click at the cursor or at a point.", _AT, ()),
    "triple_click": ("Triple-click at the cursor or at a point.", _AT, ()),
    "scroll": (
        "Scroll at the cursor or at a point.",
        {
            "scroll_direction": one_of("The direction.", "up", "down", "left", "right"),
            "scroll_amount": integer("The number of steps of the wheel."),
            **_AT,
        },
        ("scroll_direction", "scroll_amount"),
    ),
    "wait": ("Wait for a number of seconds.", _SECONDS, ("duration",)),
    "screenshot": ("Take a screenshot.", {}, ()),
    "zoom": (
        "Take an enlarged screenshot of a region.",
        {"region": _REGION},
        ("region",),
    ),
}

# Tools for browsers, and the parameters that several of them share.
_POINT_TARGET = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["coordinate"]},
        "x": integer("Pixels from the left edge of the viewport."),
        "y": integer("Pixels from the top edge of the viewport."),
    },
    "required": ["type", "x", "y"],
    "additionalProperties": False,
}
_ELEMENT = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["ref"]},
        "ref": text("The reference of an element, such as ref_7, from `read_page` or `find`."),
    },
    "required": ["type", "ref"],
    "additionalProperties": False,
}
_TAB: Properties = {"tab_id": text("The id of the tab; the active one by default.")}
_PLACE: Properties = {"target": {"anyOf": [_POINT_TARGET, _ELEMENT]}, **_TAB}
_CLICK: Properties = {
    **_PLACE,
    "modifiers": text("Keys to hold down during the action, such as ctrl+shift."),
}
_TARGET = ("target",)
_AT_POINT: Properties = {"target": _POINT_TARGET, **_TAB}
_AT_ELEMENT: Properties = {"target": _ELEMENT, **_TAB}
_DURATION = {"type": "number", "description": "Seconds, at most 30."}
_PRESSED = text("Keys, such as ctrl+a; spaces separate successive presses.")
_BROWSER_TOOLS: dict[str, Member] = {
    "navigate": (
        "Open a URL, or go back, forward or reload.",
        {"url": text("The URL, or back, forward or reload."), **_TAB},
        ("url",),
    ),
    "list_tabs": ("List all tabs with their ids, titles and URLs.", {}, ()),
    "new_tab": ("Open an empty tab and get its id.", {}, ()),
    "switch_tab": ("Switch to a tab.", _TAB, ("tab_id",)),
    "close_tab": ("Close a tab.", _TAB, ("tab_id",)),
    "read_page": (
        "Get the elements of the page as a tree, with references to use in other actions.",
        {
            "filter": one_of("Which elements; all visible ones by default.", "all", "interactive"),
            "depth": integer("The depth of the tree; 15 by default."),
            "ref": text("The reference of the element to start from."),
            **_TAB,
        },
        (),
    ),
    "get_page_text": ("Get the text of the page.", _TAB, ()),
    "read_console": ("Get the messages that the console has logged since the last call.", _TAB, ()),
    "read_network": (
        "Get the network requests that the page has made since the last call.",
        _TAB,
        (),
    ),
    "find": (
        "Find elements by a description in words, and get their references.",
        {"query": text("What to find."), **_TAB},
        ("query",),
    ),
    "form_input": (
        "Set the value of a form element.",
        {
            "value": {
                "anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}],
                "description": "The value; true or false for a checkbox.",
            },
            **_AT_ELEMENT,
        },
        ("target", "value"),
    ),
    "file_upload": (
        "Choose files, by path or by id, for a file input.",
        {
            "paths": {"type": "array", "items": {"type": "string"}},
            "document_ids": {"type": "array", "items": {"type": "string"}},
            **_AT_ELEMENT,
        },
        _TARGET,
    ),
    "scroll_to": ("Scroll until an element is visible.", _AT_ELEMENT, _TARGET),
    "screenshot": ("Take a screenshot of the viewport.", _TAB, ()),
    "zoom": (
        "Take an enlarged screenshot of a region of the viewport.",
        {
            "region": _REGION,
            **_TAB,
        },
        ("region",),
    ),
    "left_click": ("Left-click at a point or on an element.", _CLICK, _TARGET),
    "right_click": ("Right-click at a point or on an element.", _CLICK, _TARGET),
    "middle_click": ("Middle-click at a point or on an element.", _CLICK, _TARGET),
    "double_click": ("Double-click at a point or on an element.", _CLICK, _TARGET),
    "triple_click": ("Triple-click, which selects a line or a paragraph.", _CLICK, _TARGET),
    "hover": ("Move the cursor to a point or to an element.", _PLACE, _TARGET),
    "left_click_drag": (
        "Drag from one point to another.",
        {"from": _POINT_TARGET, **_AT_POINT},
        ("from", "target"),
    ),
    "left_mouse_down": ("Press the left mouse button and hold it down.", _AT_POINT, _TARGET),
    "left_mouse_up": ("Release the left mouse button.", _AT_POINT, _TARGET),
    "mouse_move": ("Move the cursor to a point.", _AT_POINT, _TARGET),
    "scroll": (
        "Scroll at a point.",
        {
            "scroll_direction": one_of("The direction.", "up", "down", "left", "right"),
            "scroll_amount": integer("The number of steps of the wheel; 3 by default."),
            **_AT_POINT,
        },
        ("scroll_direction", "target"),
    ),
    "type": ("Type text into the focused element.", {"text": text("The text."), **_TAB}, ("text",)),
    "key": (
        "Press keys.",
        {"text": _PRESSED, "repeat": integer("How many times; 1 by default."), **_TAB},
        ("text",),
    ),
    "hold_key": (
        "Hold down keys for a number of seconds.",
        {"text": _PRESSED, "duration": _DURATION, **_TAB},
        ("text", "duration"),
    ),
    "wait": ("Wait for a number of seconds.", {"duration": _DURATION, **_TAB}, ("duration",)),
    "javascript_exec": (
        "Run JavaScript in the page and get the value of the last expression.",
        {"text": text("The code, without a return statement."), **_TAB},
        ("text",),
    ),
}

# Toolsets by the type that declares them.
TOOLSETS = {
    "computer_toolset_20260801": Toolset("computer", SCREEN_TOOLS),
    "browser_toolset_20260801": Toolset(
        "browser",
        _BROWSER_TOOLS,
        frozenset({"file_upload", "read_console", "read_network", "javascript_exec"}),
    ),
}
