"""MkDocs: pages that are files of the repository outside `docs`, with links that lead there."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Pages and the files that are their text.
FILES = {
    "architecture.md": "ARCHITECTURE.md",
    "configuration.md": "configs/README.md",
    "kubernetes.md": "k8s/README.md",
}
PAGES = {file: page for page, file in FILES.items()}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    source = FILES.get(name, f"docs/{name}")
    text = (ROOT / source).read_text(encoding="utf-8") if name in FILES else markdown

    def target(match: re.Match[str]) -> str:
        label, path, anchor = match[1], match[2], match[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (ROOT / file / "README.md").exists():
            file += "/README.md"
        if file in PAGES:
            return f"[{label}]({PAGES[file]}{anchor})"
        if file.startswith("docs/"):
            return f"[{label}]({file.removeprefix('docs/')}{anchor})"
        if not (ROOT / file).exists():
            raise FileNotFoundError(f"{source} links to {path}, which does not exist")
        return label if label == path or "`" in label else f"{label} (`{file}`)"

    return LINK.sub(target, text)
