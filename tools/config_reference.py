"""`python -m tools.config_reference`: writes the tables of keys in configs/README.md.

A table is between `<!-- keys of NAME -->`, where NAME is a section of the configuration, and
`<!-- end -->`. It is made from the section's keys, their defaults and the docstrings below them.
"""

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serve_app.api.keys import ApiKey
from serve_app.config.on_demand_settings import OnDemandModelSettings, OnDemandSettings
from serve_app.config.sections import (
    AutoscalingSettings,
    EngineSettings,
    ResponseStoreSettings,
    SpeculationSettings,
)
from serve_app.config.settings import (
    AdapterSettings,
    AppSettings,
    FailoverSettings,
    ImageUrlSettings,
    ModelSettings,
    ParallelSettings,
    VisionSettings,
)

README: Final = Path(__file__).parents[1] / "configs" / "README.md"
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    section.__name__: section
    for section in (
        AdapterSettings,
        ApiKey,
        AppSettings,
        AutoscalingSettings,
        EngineSettings,
        FailoverSettings,
        ImageUrlSettings,
        ModelSettings,
        OnDemandModelSettings,
        OnDemandSettings,
        ParallelSettings,
        ResponseStoreSettings,
        SpeculationSettings,
        VisionSettings,
    )
}
_TABLE = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """The docstrings of the section's own keys, without inherited keys."""
    (statement,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(statement, ast.ClassDef)
    found = {}
    for key, text in zip(statement.body, statement.body[1:], strict=False):
        match key, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(docstring))),
            ):
                found[name] = " ".join(docstring.split())
    return found


def default(name: str, field: FieldInfo) -> str:
    """The key's default as written in YAML, but with sizes in GiB or MiB instead of bytes."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() if name.endswith("_bytes"):
            unit, size = ("GiB", 2**30) if value % 2**30 == 0 else ("MiB", 2**20)
            return f"{value // size} {unit}"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case tuple():
            return ", ".join(value) or "[]"
        case dict() | BaseModel():
            return "{}"
    return str(value)


def table(section: type[BaseModel]) -> str:
    """The table of the section's own keys."""
    rows = [
        f"| `{name}` | {default(name, section.model_fields[name])} | {meaning} |"
        for name, meaning in meanings(section).items()
    ]
    return "\n".join(["\n| key | default | meaning |", "|---|---|---|", *rows, "\n"])


def with_tables(text: str) -> str:
    """The text with the contents of all tables replaced; KeyError for an unknown section."""
    return _TABLE.sub(lambda found: found[1] + table(SECTIONS[found[2]]) + found[3], text)


def main() -> int:
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
