"""Programs that print what llama.cpp's do. Their lines have the formats of the sources."""

import sys
from pathlib import Path
from typing import Any

PROGRAMS = __name__

_DECODING = """
import sys
options = dict(zip(sys.argv, sys.argv[1:]))
prompt, steps, context = (int(options[name]) for name in ("-npp", "-ntg", "-c"))
assert options["--output-format"] == "jsonl" and ("-pps" in sys.argv) != ("-kvu" in sys.argv)
for streams in map(int, options["-npl"].split(",")):
    cells = streams * (prompt + steps)
    assert cells <= context
    print(
        '{"n_kv_max": %d, "n_batch": %d, "n_ubatch": %d, "flash_attn": %d, "is_pp_shared": %d, '
        '"n_gpu_layers": %d, "n_threads": %u, "n_threads_batch": %u, "pp": %d, "tg": %d, "pl": %d, '
        '"n_kv": %d, "t_pp": %f, "speed_pp": %f, "t_tg": %f, "speed_tg": %f, "t": %f, "speed": %f}'
        % (context, 2048, 2048, 1, "-pps" in sys.argv, 99, 8, 8, prompt, steps, streams, cells,
           0.1, prompt / 0.1, 0.5, streams * steps / 0.5, 0.6, cells / 0.6)
    )
print("\\n")
"""

_PROMPTS = """
import sys
if "--list-devices" in sys.argv:
    print("Available devices:\\n  (none)")
    raise SystemExit
options = dict(zip(sys.argv, sys.argv[1:]))
assert options["-o"] == "jsonl" and options["-n"] == "0"
for ubatch in map(int, options["-ub"].split(",")):
    for length in map(int, options["-p"].split(",")):
        print(
            '{"build_commit": "unknown", "build_number": 0, "cpu_info": "CPU", "gpu_info": "", '
            '"backends": "CPU", "n_batch": 2048, "n_ubatch": %d, "flash_attn": 1, '
            '"no_kv_offload": false, "devices": "auto", "tensor_split": "0.00", "n_prompt": %d, '
            '"n_gen": 0, "n_depth": 0, "test_time": "2026-11-27T03:49:00Z", "avg_ns": 1, '
            '"stddev_ns": 0, "avg_ts": %f, "stddev_ts": %f, "samples_ns": [ 1, 2, 3 ],'
            '"samples_ts": [ 100, %d, 900 ]}' % (ubatch, length, 400, 1, ubatch)
        )
"""


def write_programs(folder: Path) -> Path:
    """The folder, with `llama-batched-bench` and `llama-bench`."""
    folder.mkdir()
    for name, text in (("llama-batched-bench", _DECODING), ("llama-bench", _PROMPTS)):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    return folder


def run(task: Any) -> None:
    """As a section of the check: whether it gets the folder of the programs."""
    task.report.check("programs", (task.llama_cpp / "llama-batched-bench").exists())
