"""The state of a browser in results of Anthropic's browser toolset, as the model reads it."""

from typing import Any, get_args

import msgspec

from serve_app.api.fields import check_count
from serve_app.api.json_values import converted


class Tab(msgspec.Struct):
    tab_id: str
    title: str
    url: str
    active: bool = False

    def shown(self) -> str:
        active = " (active)" if self.active else ""
        return f"tab {self.tab_id}{active}: {self.title} {self.url}"


class TabOpened(msgspec.Struct, tag="tab_opened"):
    tab_id: str

    def shown(self) -> str:
        return f"tab {self.tab_id} was opened"


class DownloadStarted(msgspec.Struct, tag="download_started"):
    download_id: str
    url: str

    def shown(self) -> str:
        return f"download {self.download_id} was started: {self.url}"


class DownloadCompleted(msgspec.Struct, tag="download_completed"):
    download_id: str
    url: str
    path: str | None = None
    size_bytes: int | None = None

    def shown(self) -> str:
        told = f"download {self.download_id} was completed: {self.url}"
        told += "" if self.size_bytes is None else f", {self.size_bytes} bytes"
        return told + ("" if self.path is None else f", saved as {self.path}")


class DownloadFailed(msgspec.Struct, tag="download_failed"):
    download_id: str
    url: str
    error: str | None = None

    def shown(self) -> str:
        told = f"download {self.download_id} failed: {self.url}"
        return told if self.error is None else f"{told}, {self.error}"


Change = TabOpened | DownloadStarted | DownloadCompleted | DownloadFailed


class BrowserState(msgspec.Struct):
    """All open tabs, and what a call has changed besides."""

    tabs: list[Tab]
    state_changes: list[Change] | None = None


# Fields of a block, with those of the objects in it.
FIELDS: dict[str, Any] = {
    "tabs": {name: {} for name in Tab.__struct_fields__},
    "state_changes": {"type": {}}
    | {name: {} for kind in get_args(Change) for name in kind.__struct_fields__},
}


def browser_state(place: str, block: dict[str, Any]) -> list[str]:
    """The block at `place` as text, with a line for each tab and each change. Raises RequestError
    that names the field."""
    state = converted(place, block, BrowserState)
    entries = [*state.tabs, *(state.state_changes or ())]
    check_count(place, entries)
    # Titles and addresses are those of pages: they begin no further lines.
    lines = [" ".join(each.shown().split()) for each in entries]
    return ["\n".join(["<browser_state>", *lines, "</browser_state>\n"])]
