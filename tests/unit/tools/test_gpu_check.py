"""The check of a GPU without one: every section with tiny sizes, and sections that go wrong."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.checkout import ROOT
from tests.cuda.interpreter import leave_out_what_has_no_effect
from tests.patience import HANG_S, wait_until
from tests.unit.tools.failing_section import FAILING, raise_kept
from tests.unit.tools.hanging_section import HANGING
from tests.unit.tools.llama_cpp_programs import write_programs
from tools.gpu_check import __main__ as command
from tools.gpu_check.child import task_in
from tools.gpu_check.comparison import largest
from tools.gpu_check.report import NO_DEVICE, DeviceLostError, Report, Task
from tools.gpu_check.sections import SECTIONS, Call, Section, _joined, run_sections
from tools.gpu_check.summary import MOST_CHARACTERS, summary
from tools.gpu_check.wheels import unpack

leave_out_what_has_no_effect()


def rows_of(task: Task) -> list[dict]:
    return [json.loads(line) for line in task.report.path.read_text().splitlines()]


# Of the figures of sections, in tokens a second and as ratios.
GOALS = {
    "speed": [["at least", 400], ["at least", 11_000], ["at least", 20_000]],
    "prefill": [["at most", 1.15]],
    "peer": [["at least", 1.0]] * 3,
    "ranks": [["at least", 1.7]],
}


# The other one starts a cluster: make test-cuda.
@pytest.mark.parametrize("name", sorted(SECTIONS.keys() - {"serving"}))
def test_section_passes_without_a_device_and_gives_no_figures(name: str, tmp_path: Path) -> None:
    assert_passes_without_a_device(name, tmp_path)


def assert_passes_without_a_device(name: str, folder: Path) -> None:
    programs = write_programs(folder / "programs")
    task = task_in(folder, folder / "rows", folder / "taken", dry=True, llama_cpp=programs)
    import_module(SECTIONS[name].module).run(task)
    rows = rows_of(task)
    checks = [row for row in rows if row["kind"] == "check"]
    assert checks and all(row["passed"] for row in checks), checks
    assert [row["goal"] for row in rows if row.get("goal")] == GOALS.get(name, [])
    assert all(row["device"] == NO_DEVICE for row in rows)
    assert all(row["value"] is None for row in rows if row["kind"] == "figure")


def test_sections_that_fail_or_exceed_their_limits_cost_no_other(tmp_path: Path) -> None:
    sections = {
        "endless": Section(HANGING, 0),
        "failing": Section(FAILING, HANG_S),
        "last": Section(FAILING, HANG_S),
    }
    call = Call(tmp_path, dry=True, total_s=HANG_S)
    found = dict(run_sections(list(sections)[:2], call, sections=sections))
    found |= run_sections(["last"], replace(call, total_s=0), sections=sections)
    assert found["endless"]["state"] == "exceeded its limit of 0 s"
    assert found["failing"]["state"] == "ended with status 1"
    checks = [row for row in found["failing"]["rows"] if row["kind"] == "check"]
    assert [(row["name"], row["passed"]) for row in checks] == [
        ("first", True), ("before", True), ("ending", False), ("guarded", False),
    ]  # fmt: skip
    assert checks[2]["error"] == "the process ended with status 7"
    assert checks[3]["error"] == "ValueError: kept"
    assert "a kernel failed" in found["failing"]["output"]
    assert found["last"]["state"].startswith("not started")
    printed = summary(found, "machine", "all.json")
    assert "RuntimeError: a kernel failed" in printed and "FAILED failing: guarded" in printed
    assert "speed: no figure" in printed and "GB/s" not in printed


def test_a_check_that_never_ends_costs_only_itself(tmp_path: Path) -> None:
    sections = {"hanging": Section(HANGING, HANG_S, silent_s=0.01)}
    call = Call(tmp_path, dry=True, total_s=HANG_S)
    ((_, result),) = run_sections(["hanging"], call, sections=sections)
    failed = [row for row in result["rows"] if not row.get("passed", True)]
    assert [row["name"] for row in failed] == ["endless"] and result["state"] == "1 checks failed"
    assert failed[0]["error"] == "the process gave no result for 0.01 s"


def test_results_are_written_at_once_and_children_end_with_their_parent(tmp_path: Path) -> None:
    """The parent is killed, as it is at the limit of a call."""
    code = (
        "from tools.gpu_check.sections import *; from pathlib import Path; import sys;"
        "sections = {'hanging': Section(sys.argv[2], 600)};"
        "list(run_sections(['hanging'], Call(Path(sys.argv[1]), dry=True), sections=sections))"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, HANGING], cwd=ROOT) as parent:
        rows = tmp_path / "hanging-0.jsonl"
        wait_until(lambda: rows.exists() and rows.read_text().count("\n") == 2)
        child = json.loads(rows.read_text().splitlines()[1])["pid"]
        assert not has_ended(child)
        parent.kill()
    wait_until(lambda: has_ended(child))


def has_ended(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.split()[0] == "Z"


def test_a_process_ends_with_the_check_that_loses_the_device(tmp_path: Path) -> None:
    lost = list[str]()

    def synchronize() -> None:
        if lost:
            raise RuntimeError("illegal access")

    report = Report(tmp_path / "rows", NO_DEVICE, synchronize)
    task = Task(torch.device("cpu"), True, report, tmp_path, tmp_path / "taken")
    checks = [("kept", raise_kept), ("losing", lambda: lost.append("device")), ("next", raise_kept)]
    with pytest.raises(DeviceLostError, match="illegal access"):
        task.make(checks)
    failed = [row["name"] for row in rows_of(task) if row["kind"] == "check"]
    assert failed == ["kept", "losing"]
    lost.clear()
    task.make(checks)  # as the next process does
    failed = [row["name"] for row in rows_of(task) if row["kind"] == "check"]
    assert failed == ["kept", "losing", "next"]


def test_summary_is_short_and_every_figure_has_its_device(tmp_path: Path) -> None:
    report = Report(tmp_path / "rows", "Device 7")
    for number in range(400):
        report.check(f"check {number}", False, error="x" * 1000)
        report.figure(f"figure {number}", number + 0.5, "TB/s")
    rows = [json.loads(line) for line in report.path.read_text().splitlines()]
    result = {"state": "400 checks failed", "seconds": 1.0, "rows": rows, "output": ""}
    lines = summary({"one": result}, "machine", "all.json").splitlines()
    assert sum(map(len, lines)) + len(lines) <= MOST_CHARACTERS
    assert lines[1].startswith("one: 400 checks failed (0 of 400")
    figures = [line for line in lines if "TB/s" in line]
    assert figures and all(line.endswith("(device Device 7)") for line in figures)


def test_first_failures_of_all_processes_precede_others() -> None:
    rows = [
        {"kind": "check", "name": f"{process}, {number}", "passed": False, "process": process}
        for process in range(3)
        for number in range(9)
    ]
    result = {"state": "27 checks failed", "seconds": 1.0, "rows": rows, "output": ""}
    lines = [
        line for line in summary({"s": result}, "machine", "").splitlines() if "FAILED" in line
    ]
    shown = [line.removeprefix("  FAILED s: ").removesuffix(": {}") for line in lines]
    assert shown[:5] == ["0, 0", "1, 0", "2, 0", "0, 1", "1, 1"]
    assert shown[-1] == "15 checks more"


def test_goals_precede_what_is_cut_off(tmp_path: Path) -> None:
    report = Report(tmp_path / "rows", "Device 7")
    report.figure("streams", 412.3, "tokens/s", ("at least", 400))
    report.figure("ratio", 1.2, "", ("at most", 1.15))
    report.skip("two devices", "there is one", ("at least", 1.7))
    rows = [json.loads(line) for line in report.path.read_text().splitlines()]
    result = {"state": "passed", "seconds": 1.0, "rows": rows, "output": ""}
    assert summary({"one": result}, "machine", "all.json").splitlines()[2:5] == [
        "goal / measured: streams: at least 400 / 412.3 tokens/s, reached (device Device 7)",
        "goal / measured: ratio: at most 1.15 / 1.2, missed (device Device 7)",
        "goal / measured: two devices: at least 1.7 / skipped: there is one",
    ]


def test_command_writes_everything_and_tells_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"kind": "check", "name": "a", "passed": False, "device": NO_DEVICE}]
    state = {"state": "1 checks failed", "seconds": 1.0, "rows": rows, "output": ""}
    written = list[set[str]]()

    def run_two(names: list[str], call: Call) -> Iterator[tuple[str, dict]]:
        assert call.results == tmp_path / "all.rows" and call.results.is_dir()
        for name in names:
            yield name, state
            written.append(set(json.loads(path.read_text())["sections"]))

    monkeypatch.setattr(command, "run_sections", run_two)
    path = tmp_path / "all.json"
    assert command.main(["build", "speed", "--json", str(path), "--dry-run"]) == 1
    assert json.loads(path.read_text())["sections"] == {"build": state, "speed": state}
    assert written == [{"build"}, {"build", "speed"}]
    assert capsys.readouterr().out.endswith(f"all of it: {path}\n")


def test_a_section_without_results_has_not_passed() -> None:
    part = {"state": "passed", "seconds": 1.0, "rows": [], "output": ""}
    assert _joined([part, part])["state"] == "gave no results"
    row = {"kind": "figure", "name": "a", "value": None}
    assert _joined([part, part | {"rows": [row]}])["state"] == "passed"


def test_the_largest_error_is_nan_if_any_is() -> None:
    assert largest([1.0, 3.0, 2.0]) == 3.0 and largest([]) == 0.0
    for errors in ([nan, 1.0], [1.0, nan, 2.0]):
        assert isnan(largest(errors)) and not largest(errors) <= inf


def test_wheels_for_this_python_are_unpacked(tmp_path: Path) -> None:
    for name in ("one-1.0-py3-none-any.whl", "other-1.0-cp27-cp27m-win32.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr("module_of_a_wheel.py", "")
    (place,) = unpack(tmp_path, tmp_path / "places")
    assert (place / "module_of_a_wheel.py").exists()
    with pytest.raises(ValueError, match="no wheel"):
        unpack(tmp_path / "places", tmp_path)
