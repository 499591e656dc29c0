"""Which parts of mapped files are in the memory of processes."""

import re
from pathlib import Path


def maps_of(pid: int, path: Path) -> list[tuple[str, dict[str, int]]]:
    """The permissions and byte counts of each mapping of the file."""
    areas = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text())
    return [
        (
            area.split(maxsplit=2)[1],
            {name: 1024 * int(kb) for name, kb in re.findall(r"(\w+): +(\d+) kB", area)},
        )
        for area in areas
        if str(path) in area
    ]
