"""The chat templates of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from model_zoo.convert.configuration import optional_json, read_text
from model_zoo.convert.vocabularies.files import TokenizerFiles, listed

_KEY = "tokenizer.chat_template"
_DEFAULT = "default"


def template_keys(files: TokenizerFiles) -> dict[str, Any]:
    """The default template, and named templates with the list of their names."""
    named = _templates_by_name(files)
    found: dict[str, Any] = {}
    if _DEFAULT in named:
        found[_KEY] = named.pop(_DEFAULT)
    if named:
        found["tokenizer.chat_templates"] = sorted(named)
        found |= {f"{_KEY}.{name}": source for name, source in named.items()}
    return found


def _templates_by_name(files: TokenizerFiles) -> dict[str, str]:
    """Templates by name; separate files have priority over the settings."""
    sources: dict[str, str] = {}
    for stated in (
        files.settings.get("chat_template"),
        optional_json(files.folder / "chat_template.json").get("chat_template"),
    ):
        if isinstance(stated, str):
            sources[_DEFAULT] = stated
        for entry in listed(stated):
            if isinstance(entry, Mapping) and "name" in entry and "template" in entry:
                sources[str(entry["name"])] = str(entry["template"])
    own = files.folder / "chat_template.jinja"
    if own.exists():
        sources[_DEFAULT] = read_text(own)
    for path in sorted((files.folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path)
    return {name: source for name, source in sources.items() if source}
