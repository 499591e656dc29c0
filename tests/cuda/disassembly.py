"""The code of kernels, disassembled by one process for all: its start takes 0.25 s."""

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import triton

# Of ELF files of 64 bits: where the header has the place of the section headers, and their size,
# number, and the index of that of the names; where a section header has the place of its section.
_PLACE, _COUNTS = 0x28, 0x3A
_SECTION = "<II16xQQ"  # name, type, place in the file, bytes
_SECTION_PLACE = 0x18


@dataclass(frozen=True)
class _Code:
    """The only section of code of a cubin. header: place of the section's header in the file."""

    header: int
    data: bytes


def listings(cubins: Sequence[bytes]) -> list[str]:
    """The listing of each kernel, with labels and lines such as `/*0120*/  LDG.E R4, [R2.64] ;`,
    whose addresses begin anywhere.

    The cubins are of one kind of device, with one kernel each: the code of all is put into the
    first, one behind the other.
    """
    codes = [_code_of(cubin) for cubin in cubins]
    whole = b"".join(code.data for code in codes)
    joined = bytearray(cubins[0]) + bytes(-len(cubins[0]) % 128)
    struct.pack_into("<QQ", joined, codes[0].header + _SECTION_PLACE, len(joined), len(whole))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(joined + whole)
        file.flush()
        listing = run_tool("nvdisasm", "-ndf", "-c", file.name)  # a third faster without data flow
    return _divided(listing, [*accumulate(len(code.data) for code in codes)])


def _code_of(cubin: bytes) -> _Code:
    (begin,) = struct.unpack_from("<Q", cubin, _PLACE)
    size, count, of_names = struct.unpack_from("<3H", cubin, _COUNTS)
    _, _, names, _ = struct.unpack_from(_SECTION, cubin, begin + of_names * size)
    found = []
    for header in range(begin, begin + count * size, size):
        name, _, place, length = struct.unpack_from(_SECTION, cubin, header)
        if cubin.startswith(b".text.", names + name):
            found.append(_Code(header, cubin[place : place + length]))
    (code,) = found
    return code


def _divided(listing: str, ends: Sequence[int]) -> list[str]:
    """The parts of a listing of code that ends at these addresses; a label belongs to the
    instruction that follows."""
    parts: list[list[str]] = [[] for _ in ends]
    index, labels = 0, list[str]()
    for line in _code_lines(listing):
        if line.startswith("."):
            labels.append(line)
            continue
        address = int(line.partition("/*")[2].partition("*/")[0], 16)
        if address >= ends[index]:
            index += 1
        parts[index] += [*labels, line]
        labels.clear()
    assert all(parts)
    return ["\n".join(part) for part in parts]


def _code_lines(listing: str) -> Iterator[str]:
    """Labels and instructions."""
    for line in listing.splitlines():
        if re.match(r"\.L_x_\d+:|\s+/\*[0-9a-f]+\*/", line):
            yield line


def run_tool(name: str, *arguments: str) -> str:
    """The output of a program that Triton brings."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = [os.fspath(path), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
