"""Functions for templates converted from the language of Go: its values, printing and comparisons.

Structures of Ollama (messages, tools, calls) are dicts in the order in which Go prints them. The
keys of other maps are sorted, as by Go.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from typing import Any

from jinja2 import TemplateRuntimeError

Values = dict[str, Any]

_EXACT = 2**53
_EXPONENT_FROM = 1e21  # numbers from here on have an exponent in JSON
_TYPESCRIPT = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "array": "any[]",
    "object": "Record<string, any>",
    "null": "null",
}
_VERB = re.compile(r"%([-+# 0]*)(\d*)(?:\.(\d*))?(.)", re.DOTALL)


class _Root(dict[str, Any]):
    """The top-level values, a map: missing fields are nil."""


class _Printed(dict[str, Any]):
    """A structure, or a map of Ollama's own type, which is printed as JSON."""


class _Types(list[str]):
    """The types of a property; a single one is printed without a list."""


def go_values(
    messages: list[Values],
    tools: list[Values] | None = None,
    think: bool | None = None,
    level: str | None = None,
) -> Values:
    """The values of templates with `.Messages`. Consecutive messages of a role, except those of
    tools, are joined."""
    joined: list[Values] = []
    for message in map(_message, messages):
        role = message["role"]
        if joined and role == joined[-1]["role"] != "tool":
            joined[-1]["content"] += "\n\n" + message["content"]
        else:
            joined.append(message)
    systems = [message["content"] for message in map(_message, messages) if _is_system(message)]
    return _Root(
        system="\n\n".join(systems),
        messages=joined,
        tools=[_tool(tool) for tool in tools or ()],
        response="",
        think=bool(think),
        think_level=level or ("medium" if think else ""),
        is_think_set=think is not None,
    )


def go_infill(prompt: str, suffix: str) -> Values:
    """The values of templates for infill, a text between two others."""
    return _Root(prompt=prompt, suffix=suffix, response="")


def go_turns(values: Values) -> list[Values]:
    """The values of templates without `.Messages`, for each turn. A turn ends when a user's message
    follows an answer, or when a system message follows any message."""
    turns = [{"system": "", "prompt": "", "response": ""}]
    for message in values["messages"]:
        turn = turns[-1]
        name = {"system": "system", "user": "prompt", "assistant": "response"}.get(message["role"])
        if name is None:
            continue
        ended = name == "prompt" and turn["response"]
        if ended or (name == "system" and (turn["prompt"] or turn["response"])):
            turns.append({"system": "", "prompt": "", "response": ""})
        turns[-1][name] = message["content"]
    thinking = {key: values[key] for key in ("think", "think_level", "is_think_set")}
    return [_Root(turn | thinking) for turn in turns]


def go_field(value: Any, name: str, zero: Any) -> Any:
    """A field of a structure, or of the top-level values, where it may be missing."""
    if isinstance(value, _Root):
        return value.get(name)
    if not isinstance(value, Mapping):
        raise TemplateRuntimeError(f"a {_kind(value)} has no field {name}")
    found = value.get(name)
    return zero if found is None else found


def go_root_field(value: Any, name: str) -> Any:
    """A field that only the top-level values have."""
    if not isinstance(value, _Root):
        raise TemplateRuntimeError(f"a {_kind(value)} has no field {name}")
    return value.get(name)


def go_entries(value: Any) -> list[tuple[Any, Any]]:
    """The keys and elements that `range` iterates over."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return sorted(value.items())
    if isinstance(value, list):
        return list(enumerate(value))
    if type(value) is int:
        return [(number, number) for number in range(value)]
    raise TemplateRuntimeError(f"range over a {_kind(value)}")


def go_text(value: Any) -> str:
    """The value as Go prints it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "<no value>"
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, _Types) and len(value) < 2:
        return "".join(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list) and not any(isinstance(each, _Printed) for each in value):
        return f"[{' '.join(map(_element, value))}]"
    if isinstance(value, Mapping) and not isinstance(value, _Printed):
        return f"map[{' '.join(f'{key}:{_element(each)}' for key, each in value.items())}]"
    return go_json(value)


def go_json(value: Any) -> str:
    """Compact JSON with the escapes of Go's encoder."""
    text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def go_eq(first: Any, *others: Any) -> bool:
    if not others:
        raise TemplateRuntimeError("eq has one argument only")
    return any(_equal(first, other) for other in others)


def go_ne(first: Any, second: Any) -> bool:
    return not _equal(first, second)


def go_lt(first: Any, second: Any) -> bool:
    kinds = {_kind(first), _kind(second)}
    if len(kinds) > 1 or kinds.isdisjoint({"int", "float", "string"}):
        raise TemplateRuntimeError(f"{' and '.join(sorted(kinds))} cannot be ordered")
    return bool(first < second)


def go_le(first: Any, second: Any) -> bool:
    return go_lt(first, second) or _equal(first, second)


def go_gt(first: Any, second: Any) -> bool:
    return not go_le(first, second)


def go_ge(first: Any, second: Any) -> bool:
    return not go_lt(first, second)


def go_len(value: Any) -> int:
    """The length of a value; of a text, the number of bytes."""
    if isinstance(value, str):
        return len(_bytes(value))
    if not isinstance(value, list | Mapping):
        raise TemplateRuntimeError(f"len of a {_kind(value)}")
    return len(value)


def go_index(value: Any, *keys: Any) -> Any:
    for key in keys:
        if isinstance(value, Mapping):
            value = value.get(key)
            continue
        elements = _bytes(value) if isinstance(value, str) else value
        if not isinstance(elements, list | bytes):
            raise TemplateRuntimeError(f"index of a {_kind(value)}")
        if type(key) is not int or not 0 <= key < len(elements):
            raise TemplateRuntimeError(f"index out of range: {go_text(key)}")
        value = elements[key]
    return value


def go_slice(value: Any, *bounds: Any) -> Any:
    if not isinstance(value, str | list) or len(bounds) > 2:
        raise TemplateRuntimeError(f"slice of a {_kind(value)} with {len(bounds)} indices")
    elements = _bytes(value) if isinstance(value, str) else value
    begin = bounds[0] if bounds else 0
    end = bounds[1] if len(bounds) > 1 else len(elements)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(elements):
        raise TemplateRuntimeError(f"slice out of range: {go_text(begin)}, {go_text(end)}")
    part = elements[begin:end]
    return part.decode("utf-8", "replace") if isinstance(part, bytes) else part


def go_print(*values: Any) -> str:
    """All values as text, with a space between adjacent values that are both not texts."""
    text = ""
    for number, value in enumerate(values):
        apart = number and not isinstance(value, str) and not isinstance(values[number - 1], str)
        text += (" " if apart else "") + _element(value)
    return text


def go_println(*values: Any) -> str:
    return " ".join(map(_element, values)) + "\n"


def go_printf(form: Any, *values: Any) -> str:
    if not isinstance(form, str):
        raise TemplateRuntimeError(f"printf with a {_kind(form)} as its format")
    left = list(values)

    def formatted(found: re.Match[str]) -> str:
        flags, width, precision, verb = found.groups()
        if verb == "%":
            return "%"
        if not left:
            raise TemplateRuntimeError(f"printf has too few values for {form[:40]!r}")
        text = _verb(verb, left.pop(0), flags, precision)
        if "0" in flags and "-" not in flags and verb in "dfxg":
            return text.zfill(int(width or 0))
        return text.ljust(int(width or 0)) if "-" in flags else text.rjust(int(width or 0))

    text = _VERB.sub(formatted, form)
    if left:
        raise TemplateRuntimeError(f"printf has too many values for {form[:40]!r}")
    return text


def go_to_typescript(value: Any) -> str:
    """The type of a tool's parameter, as in TypeScript."""
    if not isinstance(value, Mapping):
        return "any"
    options = value.get("anyOf")
    if options:
        return " | ".join(map(go_to_typescript, options))
    return " | ".join(_TYPESCRIPT.get(each, "any") for each in value.get("type") or ()) or "any"


def go_day_before(day: str) -> str:
    return str(date.fromisoformat(day) - timedelta(days=1))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "go_toTypeScriptType": go_to_typescript,
    **{
        each.__name__: each
        for each in (
            *(go_values, go_turns, go_field, go_entries, go_text, go_json, go_len, go_index),
            *(go_eq, go_ne, go_lt, go_le, go_gt, go_ge, go_slice, go_print, go_println),
            *(go_printf, go_day_before, go_infill, go_root_field),
        )
    },
}


def _is_system(message: Values) -> bool:
    return bool(message["role"] == "system")


def _message(message: Values) -> Values:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    role = message["role"]
    further = {
        "thinking": message.get("thinking"),
        "tool_calls": [_call(*each) for each in enumerate(message.get("tool_calls") or ())],
        "tool_name": message.get("name") if role == "tool" else None,
        "tool_call_id": message.get("tool_call_id"),
    }
    return _Printed(
        role=role,
        content=content,
        **{name: value for name, value in further.items() if value},
    )


def _call(index: int, call: Values) -> Values:
    function = call["function"]
    arguments = _Printed(_sorted(function["arguments"]))
    called = _Printed(index=index, name=function["name"], arguments=arguments)
    return _Printed(id=call.get("id") or "", function=called)


def _tool(tool: Values) -> Values:
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    described = _Printed(
        type=parameters.get("type") or "",
        **_present(parameters, "$defs", "items", "required"),
        properties=_properties(parameters.get("properties")),
    )
    named = {name: function.get(name) or "" for name in ("name", "description")}
    return _Printed(
        type=tool.get("type") or "",
        **_present(tool, "items"),
        function=_Printed(**named, parameters=described),
    )


def _properties(properties: Any) -> Values:
    named = properties.items() if isinstance(properties, Mapping) else ()
    return _Printed({name: _property(each) for name, each in sorted(named)})


def _property(described: Any) -> Values:
    if not isinstance(described, Mapping):
        return _Printed()
    types = described.get("type") or []
    found = _Printed()
    if isinstance(described.get("anyOf"), list):
        found["anyOf"] = [_property(each) for each in described["anyOf"]]
    if types:
        found["type"] = _Types([types] if isinstance(types, str) else types)
    found.update(_present(described, "items", "description", "enum"))
    if described.get("properties"):
        found["properties"] = _properties(described["properties"])
    found.update(_present(described, "required"))
    return found


def _present(values: Mapping[str, Any], *names: str) -> Values:
    return {name: _sorted(values[name]) for name in names if values.get(name)}


def _sorted(value: Any) -> Any:
    """JSON values as decoded by Go: sorted keys, and floats for all numbers."""
    if isinstance(value, Mapping):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return float(value) if type(value) is int and abs(value) <= _EXACT else value


def _plain(value: Any) -> Any:
    """The value for JSON: floats without a fraction as integers, a single type as a text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, _Types) and len(value) == 1:
        return value[0]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXPONENT_FROM
    return int(value) if whole else value


def _element(value: Any) -> str:
    """A value within a printed list."""
    return "<nil>" if value is None else go_text(value)


def _kind(value: Any) -> str:
    if value is None:
        return "nil"
    if isinstance(value, Mapping):
        return "map"
    names = {str: "string", bool: "bool", int: "int", float: "float"}
    return names.get(type(value), "list")


def _equal(first: Any, second: Any) -> bool:
    kinds = {_kind(first), _kind(second)}
    if not kinds.isdisjoint({"map", "list"}):
        raise TemplateRuntimeError(f"{' and '.join(sorted(kinds))} cannot be compared")
    if len(kinds) > 1 and "nil" not in kinds:
        raise TemplateRuntimeError(f"{' and '.join(sorted(kinds))} cannot be compared")
    return bool(first == second)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _float_text(value: float) -> str:
    """A float as Go's verb %v prints it: the shortest digits, with an exponent below 1e-4 and from
    1e6 on."""
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    digits = repr(value).partition("e")[0]
    mantissa = digits.lstrip("-").replace(".", "").strip("0") or "0"
    exponent = int(f"{value:.16e}".partition("e")[2])
    if -4 <= exponent < 6:
        return f"{value:.{max(0, len(mantissa) - 1 - exponent)}f}"
    sign = "-" if value < 0 else ""
    fraction = f".{mantissa[1:]}" if len(mantissa) > 1 else ""
    return f"{sign}{mantissa[0]}{fraction}e{exponent:+03d}"


def _verb(verb: str, value: Any, flags: str, precision: str | None) -> str:
    """One value as printed by a verb of printf."""
    sign = "+" if "+" in flags else " " if " " in flags else ""
    if verb in "sv":
        text = _element(value)
        return text if precision is None else text[: int(precision or 0)]
    if verb == "q" and isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if verb == "t" and isinstance(value, bool):
        return go_text(value)
    if verb in "dx" and type(value) is int:
        return format(value, sign + verb)
    if verb in "feg" and isinstance(value, float):
        return format(value, f"{sign}.{6 if precision is None else int(precision or 0)}{verb}")
    raise TemplateRuntimeError(f"printf cannot print a {_kind(value)} with %{verb}")
