"""The check of a GPU without one: every section with tiny sizes, and sections that go wrong."""

import json
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.cuda.interpreter import leave_out_what_has_no_effect
from tests.unit.tools.llama_cpp_programs import write_programs
from tools.gpu_check import __main__ as command
from tools.gpu_check.child import task_in
from tools.gpu_check.report import NO_DEVICE, Report, Task
from tools.gpu_check.sections import SECTIONS, Section, run_sections
from tools.gpu_check.summary import MOST_CHARACTERS, summary
from tools.gpu_check.wheels import unpack

leave_out_what_has_no_effect()


def run(task: Task) -> None:
    """A section that ends with an error after a check and a figure, for children."""
    task.report.check("first", True)
    with task.report.guarding("guarded"):
        raise ValueError("kept")
    task.report.figure("speed", 3.0, "GB/s")
    raise RuntimeError("a kernel failed")


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
    task = task_in(folder, dry=True, llama_cpp=write_programs(folder / "programs"))
    import_module(SECTIONS[name].module).run(task)
    rows = rows_of(task)
    checks = [row for row in rows if row["kind"] == "check"]
    assert checks and all(row["passed"] for row in checks), checks
    assert [row["goal"] for row in rows if row.get("goal")] == GOALS.get(name, [])
    assert all(row["device"] == NO_DEVICE for row in rows)
    assert all(row["value"] is None for row in rows if row["kind"] == "figure")


def test_sections_that_fail_or_exceed_their_limits_cost_no_other(tmp_path: Path) -> None:
    sections = {
        "endless": Section("tools.gpu_check.ceilings", 0.01),
        "failing": Section(__name__, 600),
        "last": Section(__name__, 600),
    }
    found = run_sections(list(sections)[:2], sections=sections, dry=True, total_s=600)
    found |= run_sections(["last"], sections=sections, dry=True, total_s=0)
    assert found["endless"]["state"] == "exceeded its limit of 0 s"
    assert found["failing"]["state"] == "ended with status 1"
    assert [row.get("passed") for row in found["failing"]["rows"]] == [True, False, None]
    assert "ValueError: kept" in str(found["failing"]["rows"])
    assert "a kernel failed" in found["failing"]["output"]
    assert found["last"]["state"].startswith("not started")
    printed = summary(found, "machine", "all.json")
    assert "RuntimeError: a kernel failed" in printed and "FAILED failing: guarded" in printed
    assert "speed: no figure" in printed and "GB/s" not in printed


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
    monkeypatch.setattr(command, "run_sections", lambda names, **_: dict.fromkeys(names, state))
    path = tmp_path / "all.json"
    assert command.main(["build", "--json", str(path), "--dry-run"]) == 1
    assert json.loads(path.read_text())["sections"] == {"build": state}
    assert capsys.readouterr().out.endswith(f"all of it: {path}\n")


def test_wheels_for_this_python_are_unpacked(tmp_path: Path) -> None:
    for name in ("one-1.0-py3-none-any.whl", "other-1.0-cp27-cp27m-win32.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr("module_of_a_wheel.py", "")
    (place,) = unpack(tmp_path, tmp_path / "places")
    assert (place / "module_of_a_wheel.py").exists()
    with pytest.raises(ValueError, match="no wheel"):
        unpack(tmp_path / "places", tmp_path)
