"""Triton kernels compiled ahead of time for CUDA devices, on a machine without one.

Triton brings NVIDIA's assembler and disassembler. What a device does with the code (achieved
bandwidth, occupancy, races) cannot be seen here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

from tests.cuda.disassembly import listings, run_tool

# A100, L4 and RTX 4090, H100 and H200, B200, RTX 5090.
CAPABILITIES = (80, 89, 90, 100, 120)
_WAIT = "ACQBULK"
# Writes, and copies to shared memory, which are those of activations.
_EARLY_NEVER = ("ST", "RED", "ATOM", "LDGSTS", "UTMALDG", "UBLKCP")


@dataclass(frozen=True)
class Specimen:
    """A kernel with the types of its arguments ("*fp32", "i32", ...) and its constants.

    Pointers, and the integers in `multiples`, are multiples of 16, as they are at run time.
    `fused`: whether products may be fused with sums; `most_registers` of a thread; both as at the
    launch. `reads_early`: whether it reads weights before the previous launch has ended.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, object]
    multiples: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3
    fused: bool = True
    most_registers: int | None = None
    reads_early: bool = False


@dataclass(frozen=True)
class Compiled:
    """registers: per thread; stack: bytes per thread, for spilled registers too; shared: bytes per
    block; instructions: number of each in the code, by its full name, such as LDG.E.128; looped:
    the same of its longest loop without loops inside, nothing if there is none."""

    registers: int
    stack: int
    shared: int
    instructions: Mapping[str, int] = field(repr=False)
    looped: Mapping[str, int] = field(repr=False)

    def count(self, prefix: str) -> int:
        """Instructions whose name starts so."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))

    @property
    def loop(self) -> int:
        """Instructions of the longest loop."""
        return sum(self.looped.values())


def compile_all(module: str, capability: int) -> dict[str, Compiled]:
    """What the function `specimens` of this module returns by name for the capability, compiled by
    another process: here kernels are interpreted."""
    compiler = _compiler(capability)
    assert compiler.stdin is not None and compiler.stdout is not None
    print(module, file=compiler.stdin, flush=True)
    answer = json.loads(compiler.stdout.readline())
    assert isinstance(answer, dict), answer
    return {name: Compiled(**parts) for name, parts in answer.items()}


@cache
def _compiler(capability: int) -> subprocess.Popen[str]:
    """Runs `main` until this process ends, since its imports take longer than most modules."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", __name__, str(capability)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def compile_specimens(specimens: Mapping[str, Specimen], capability: int) -> dict[str, Compiled]:
    """Only where TRITON_INTERPRET was not set when the kernels were imported.

    Raises AssertionError if a product would be wrong, see `assert_dots_are_filled` and
    `assert_operands_last`, or something would be read or written too early, see `assert_waits`.
    """
    built = [_built(specimen, capability) for specimen in specimens.values()]
    codes = listings([each.asm["cubin"] for each in built])
    found = {}
    for (name, specimen), each, code in zip(specimens.items(), built, codes, strict=True):
        assert_dots_are_filled(each.asm["ttgir"])
        assert_operands_last(code)
        if _WAIT in code:
            assert_waits(code, reads_early=specimen.reads_early)
        found[name] = _described(each, code)
    return found


def _built(specimen: Specimen, capability: int) -> Any:
    """What Triton compiles."""
    names = specimen.kernel.arg_names
    signature = {name: specimen.types.get(name, "constexpr") for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*")
        or (name in specimen.multiples and signature[name] != "constexpr")
    ]
    source = ASTSource(
        specimen.kernel,
        signature=signature,
        constexprs=dict(specimen.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    with _as_current(target):
        return triton.compile(
            source,
            target=target,
            options={
                "num_warps": specimen.warps,
                "num_stages": specimen.stages,
                "enable_fp_fusion": specimen.fused,
                "maxnreg": specimen.most_registers,
            },
        )


def _described(built: Any, code: str) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, shared, local = map(int, found.groups())
    return Compiled(
        registers, stack + local, max(shared, built.metadata.shared), _instructions(code),
        _instructions(_longest_loop(code)),
    )  # fmt: skip


@contextmanager
def _as_current(target: GPUTarget) -> Iterator[None]:
    """Kernels ask for the target where they have code for some devices only."""

    def current() -> GPUTarget:
        return target

    current.__triton_builtin__ = True  # type: ignore[attr-defined]
    with patch.object(target_info, "current_target", current):
        yield


def assert_dots_are_filled(ttgir: str) -> None:
    """Each of four threads holds `kWidth` adjacent inner elements of an operand in registers. Where
    there are fewer inner elements than that, Triton 3.6 gives wrong sums, as an H200 showed."""
    operands = re.findall(
        r"tt\.dot .*?tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, [^}]*kWidth = (\d+)\}", ttgir
    )
    narrow = [(inner, width) for inner, width in operands if int(inner) < 4 * int(width)]
    assert not narrow, narrow


def assert_operands_last(code: str) -> None:
    """Tensor cores of Hopper read registers of an operand until a product has ended. NVIDIA's
    assembler before 13.3 takes such registers for other values while the product is in flight
    (triton-lang/triton#11781); here none may be written until the wait, in the next round of a
    loop either."""
    lines = code.splitlines()
    labels = {line.strip(): number for number, line in enumerate(lines) if line.startswith(".L_x")}
    for end, line in enumerate(lines):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if target and labels[f"{target[1]}:"] < end - 1:
            _assert_kept(lines[: end + 1] + lines[labels[f"{target[1]}:"] : end + 1])


def _assert_kept(lines: Sequence[str]) -> None:
    """The operands of groups of products in flight, of which the last is not complete."""
    groups: list[set[int]] = [set()]
    for line in lines:
        if "HGMMA" in line:
            if operand := re.search(r"HGMMA\S+ R\d+, R(\d+),", line):
                groups[-1].update(range(int(operand[1]), int(operand[1]) + 4))
            if "gsb0" in line:
                groups.append(set())
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+) ", line):
            del groups[: -1 - int(wait[1])]
        else:
            assert not set().union(*groups) & _written(line), line


def _written(line: str) -> set[int]:
    """The registers that an instruction writes."""
    found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+) R(\d+),", line)
    if found is None:
        return set()
    name, first = found[1], int(found[2])
    wide = "64" in name or "WIDE" in name
    count = 4 if "128" in name or name.startswith("LDSM") else 2 if wide else 1
    return set(range(first, first + count))


def assert_waits(code: str, *, reads_early: bool) -> None:
    """Nothing in global memory is written, and nothing but weights is read, before the wait for
    previous launches."""
    names = _names(code)
    before = names[: names.index(_WAIT)]
    assert not [name for name in before if name.startswith(_EARLY_NEVER)], before
    assert any(name.startswith("LDG") for name in before) == reads_early


def _instructions(code: str) -> dict[str, int]:
    return dict(Counter(_names(code)))


def _names(code: str) -> list[str]:
    """Of a listing with lines such as `/*0120*/  @P1 LDG.E.128 R4, [R2.64] ;`. The predicate of
    instructions that are never executed is !PT."""
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?!@!PT )(?:@!?U?P\w+ )?([A-Z][\w.]+)", code, re.M)


def _longest_loop(code: str) -> str:
    """Labels are `.L_x_1:`; a loop ends with a branch to one above, except to itself."""
    labels: dict[str, int] = {}
    lines, longest, innermost = list[str](), list[str](), 0
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"^\s+/\*[0-9a-f]+\*/", line):
            lines.append(line)
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            begin = labels.get(target[1], len(lines)) if target else len(lines)
            if innermost <= begin < len(lines) - 1:
                longest = max(longest, lines[begin:], key=len)
                innermost = len(lines)
    return "\n".join(longest)


def main(capability: int) -> None:
    """Print for each module that is read what `compile_all` returns, or the error, as JSON."""
    for module in map(str.strip, sys.stdin):
        try:
            compiled = compile_specimens(import_module(module).specimens(capability), capability)
            print(json.dumps({name: vars(each) for name, each in compiled.items()}), flush=True)
        except Exception:
            print(json.dumps(traceback.format_exc()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
