"""A model's own parameters: all options of Ollama, including those not supported here."""

from collections.abc import Mapping
from typing import Any

from runtime.errors import RequestError
from serve_app.config.options import BOUNDS, Bounds, number, stop_strings, unknown_option

# Parameters that are stored and shown but not used. Ollama has removed some of them.
_KEPT: Mapping[str, Bounds] = {
    "num_batch": Bounds(int),
    "num_gpu": Bounds(int),
    "main_gpu": Bounds(int),
    "num_thread": Bounds(int),
    "draft_num_predict": Bounds(int),
    "tfs_z": Bounds(float),
    "mirostat": Bounds(int),
    "mirostat_tau": Bounds(float),
    "mirostat_eta": Bounds(float),
}
_SWITCHES = frozenset(
    {"use_mmap", "use_mlock", "low_vram", "f16_kv", "logits_all", "vocab_only", "numa"}
    | {"penalize_newline"}
)
PARAMETER_NAMES = frozenset({"stop", *BOUNDS, *_KEPT, *_SWITCHES})


def check_parameters(raw: Mapping[str, Any]) -> None:
    """Raises a RequestError that names an unknown parameter, or the required type or range."""
    for name, value in raw.items():
        if name not in PARAMETER_NAMES:
            raise unknown_option(name, PARAMETER_NAMES)
        if value is None:
            continue
        if name == "stop":
            stop_strings(value)
        elif name in _SWITCHES:
            _check_switch(name, value)
        else:
            number(name, value, BOUNDS.get(name) or _KEPT[name], noun="option")


def known_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that Ollama knows, with their stored values, valid or not."""
    return {
        name: value for name, value in raw.items() if name in PARAMETER_NAMES and value is not None
    }


def parameter_of(name: str, text: str) -> Any:
    """The value of an untyped Modelfile parameter; not checked."""
    if name in _SWITCHES:
        return {"true": True, "false": False}.get(text.lower(), text)
    if name == "stop":
        return text
    bounds = BOUNDS.get(name) or _KEPT.get(name)
    for kind in (int,) if bounds is not None and bounds.type is int else (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f'option "{name}" must be of type boolean')
