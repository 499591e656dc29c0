"""The comparison with llama.cpp on a GPU: what its programs print, and programs that go wrong."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.cuda.interpreter import leave_out_what_has_no_effect
from tests.unit.tools.llama_cpp_programs import PROGRAMS, write_programs
from tools.gpu_check import peer
from tools.gpu_check.child import task_in
from tools.gpu_check.sections import SECTIONS, Call, Section, run_sections

leave_out_what_has_no_effect()

# In the formats of llama-batched-bench and llama-bench, with the programs' other output.
DECODING = """
{"n_kv_max": 327680, "n_batch": 2048, "n_ubatch": 2048, "flash_attn": 1, "is_pp_shared": 1, \
"n_gpu_layers": 99, "n_threads": 8, "n_threads_batch": 8, "pp": 960, "tg": 128, "pl": 8, \
"n_kv": 8704, "t_pp": 0.080000, "speed_pp": 12000.000000, "t_tg": 1.280000, \
"speed_tg": 800.000000, "t": 1.360000, "speed": 6400.000000}
{"n_kv_max": 327680, "n_batch": 2048, "n_ubatch": 2048, "flash_attn": 1, "is_pp_shared": 1, \
"n_gpu_layers": 99, "n_threads": 8, "n_threads_batch": 8, "pp": 960, "tg": 128, "pl": 8, \
"n_kv": 8704, "t_pp": 0.080000, "speed_pp": 12000.000000, "t_tg": 1.250000, \
"speed_tg": 819.200012, "t": 1.330000, "speed": 6544.360840}
{"n_kv_max": 327680, "n_batch": 2048, "n_ub"""
PROMPTS = """\
{"build_commit": "unknown", "build_number": 0, "cpu_info": "CPU \\"8\\"", "gpu_info": "H100", \
"backends": "CUDA", "n_ubatch": 512, "no_kv_offload": false, "n_prompt": 2048, "n_gen": 0, \
"avg_ts": 8000.000000, "stddev_ts": 1.500000, "samples_ns": [ 1, 2, 3 ],\
"samples_ts": [ 7000, 9000.5, 8000 ]}
{"build_commit": "unknown", "build_number": 0, "cpu_info": "CPU \\"8\\"", "gpu_info": "H100", \
"backends": "CUDA", "n_ubatch": 2048, "no_kv_offload": false, "n_prompt": 2048, "n_gen": 0, \
"avg_ts": 10000.000000, "stddev_ts": 1.500000, "samples_ns": [ 1, 2, 3 ],\
"samples_ts": [ 9000, 20000, 1e+04 ]}
"""


def test_best_rows_of_whole_lines_count() -> None:
    assert peer.decoding_speeds(peer.rows_of(DECODING)) == {"8 streams": 819.200012}
    assert peer.prompt_speeds(peer.rows_of(PROMPTS)) == {"prefill of 2048": 10_000}


def test_without_programs_every_ratio_is_skipped_with_its_reason(tmp_path: Path) -> None:
    task = task_in(tmp_path, tmp_path / "rows", tmp_path / "taken", dry=True, llama_cpp=None)
    peer.run(task)
    rows = [json.loads(line) for line in task.report.path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["skipped"] * 3
    assert {row["reason"] for row in rows} == {"no `--llama-cpp FOLDER` is given"}


def test_folder_of_programs_reaches_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECTIONS, "peer", Section(PROGRAMS, SECTIONS["peer"].limit_s))
    folder = write_programs(tmp_path / "programs")
    ((_, found),) = run_sections(["peer"], Call(tmp_path, dry=True, llama_cpp=folder))
    assert found["state"] == "passed", found
    assert [row["passed"] for row in found["rows"]] == [True]


def test_programs_that_fail_leave_failed_checks(tmp_path: Path) -> None:
    folder = write_programs(tmp_path / "programs")
    (folder / "llama-batched-bench").write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    task = task_in(tmp_path, tmp_path / "rows", tmp_path / "taken", dry=True, llama_cpp=folder)
    peer.run(task)
    rows = [json.loads(line) for line in task.report.path.read_text().splitlines()]
    failed = [row for row in rows if not row.get("passed", True)]
    ended, missing = failed[:2], [row["name"] for row in failed[2:]]
    assert all(row["said"] == "no memory\n" and row["status"] == 1 for row in ended)
    assert missing == [f"llama.cpp, {count} streams, is measured" for count in (1, 2)]
