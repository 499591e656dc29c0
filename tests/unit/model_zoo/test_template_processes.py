"""Templates render in processes of their own, which the kernel limits and nothing outlives."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from model_zoo.chat.messages import ChatTemplate, Message
from model_zoo.chat.sandbox import renderer
from runtime.errors import ModelFileError, RequestError

ROOT = Path(__file__).resolve().parents[3]
SAID = "{% for m in messages %}{{ m.content }};{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FAR_SECONDS = 60.0  # until what must happen soon counts as not happening


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def rendering_processes() -> list[int]:
    """Of this process: those that templates are rendered in, behind the one that forks them."""
    forking = [
        child
        for child in children(os.getpid())
        if "model_zoo.chat.sandbox" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return [*forking, *(forked for child in forking for forked in children(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_the_end_of(pids: list[int]) -> None:
    end = time.monotonic() + FAR_SECONDS
    while any(map(alive, pids)):
        assert time.monotonic() < end, [pid for pid in pids if alive(pid)]
        time.sleep(0.01)


def run_python(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, **options
    )


def test_threads_that_render_at_once_get_their_own_texts() -> None:
    template = ChatTemplate(SAID)

    def rendered(number: int) -> str:
        return template.render([Message("user", f"{number} ") for _ in range(number % 50)])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rendered, range(400))) == [
            f"{number} ;" * (number % 50) for number in range(400)
        ]


def test_processes_that_are_killed_are_replaced() -> None:
    template = ChatTemplate(SAID)
    for _ in range(2):
        assert template.render([Message("user", "Hello")]) == "Hello;"
        killed = rendering_processes()
        assert len(killed) >= 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for_the_end_of(killed)


def test_a_template_goes_on_after_a_rendering_that_took_too_long() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}" + SAID)
    for _ in range(2):
        with pytest.raises(RequestError, match="processor time"):
            template.render([Message("user", "Hello")] * 2)
        assert template.render([Message("user", "Hello")]) == "Hello;"


def test_a_template_goes_on_after_a_rendering_that_needed_too_much_memory() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'a' * 10**9 }}{% endif %}" + SAID)
    for _ in range(2):
        with pytest.raises(RequestError, match="MiB of memory"):
            template.render([Message("user", "Hello")] * 2)
        assert template.render([Message("user", "Hello")]) == "Hello;"


def test_a_template_that_writes_too_much_is_refused() -> None:
    with pytest.raises(RequestError, match="bytes of text"):
        ChatTemplate("{{ 'a' * 10**6 }}").render([Message("user", "Hello")])


def test_a_rendering_that_had_to_give_way_is_the_last_of_its_process(monkeypatch) -> None:
    monkeypatch.setattr(renderer, "_PATIENCE_MS", 0)
    template = ChatTemplate("{% for i in range(9999) %}{% endfor %}" + SAID)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for text in ("one", "two"):
        assert template.render([Message("user", text)]) == f"{text};"
        wait_for_the_end_of([pid for pid in rendering_processes() if niceness(pid) > own])


def niceness(pid: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except ProcessLookupError:
        return 0


def test_a_fork_of_this_process_gets_a_process_of_its_own() -> None:
    template = ChatTemplate(SAID)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, template.render([Message("user", "child")]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    texts = {template.render([Message("user", "parent")]) for _ in range(50)}
    with open(reading, encoding="utf-8") as said:
        assert (said.read(), texts) == ("child;", {"parent;"})
    os.waitpid(pid, 0)


def test_nothing_of_a_process_that_is_killed_stays() -> None:
    script = (
        "import time\n"
        "from model_zoo.chat.messages import ChatTemplate, Message\n"
        "from tests.unit.model_zoo.test_template_processes import SAID, rendering_processes\n"
        "templates = [ChatTemplate(SAID) for _ in range(3)]\n"
        "print(*rendering_processes(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 4
    wait_for_the_end_of(pids)


def test_a_template_that_is_dropped_takes_its_processes_along() -> None:
    kept = ChatTemplate(SAID)
    before = set(rendering_processes())
    dropped = ChatTemplate(SAID)
    new = set(rendering_processes()) - before
    assert len(new) == 1
    del dropped
    wait_for_the_end_of([*new])
    assert kept.render([Message("user", "Hello")]) == "Hello;"


def test_the_process_that_forks_imports_no_large_library() -> None:
    script = (
        "import sys, model_zoo.chat.sandbox.server\n"
        "print({'torch', 'numpy', 'ray', 'subprocess', 'asyncio'} & set(sys.modules) or 'none')"
    )
    assert run_python(script).stdout == "none\n"


def test_modules_are_found_that_are_not_on_the_path() -> None:
    """As in an editable installation, whose modules a hook finds."""
    script = (
        "import sys\n"
        "from model_zoo.chat.messages import ChatTemplate, Message\n"
        f"sys.path = [path for path in sys.path if path not in ('', {str(ROOT)!r})]\n"
        "print(ChatTemplate('{{ messages[0].content }}').render([Message('user', 'found')]))"
    )
    done = run_python(script)
    assert done.stdout == "found\n", done.stderr


LIMITED = (
    "from model_zoo.chat.sandbox.frames import Limits\n"
    "from model_zoo.chat.sandbox.limits import accept_limits, address_space_bytes, limited\n"
    "accept_limits()\n"
    "with limited(Limits({seconds}, 64 << 20, 0), idle_bytes=address_space_bytes()):\n"
    "    {work}\n"
)


def test_time_ends_a_process_within_a_single_call() -> None:
    work = "('…' * 9999999).strip('Ħ' * 9999999 + '…')"
    done = run_python(LIMITED.format(seconds=0.01, work=work))
    assert done.returncode == -signal.SIGPROF


def test_memory_beyond_the_limit_is_an_error_and_what_is_below_is_none() -> None:
    done = run_python(LIMITED.format(seconds=60, work="bytearray(32 << 20); bytearray(96 << 20)"))
    assert "MemoryError" in done.stderr
    done = run_python(LIMITED.format(seconds=60, work="bytearray(32 << 20); print('done')"))
    assert done.stdout == "done\n"


def test_compiling_is_limited_too() -> None:
    """Fewer characters than may be, of which Jinja makes a hundred times more than usual."""
    with pytest.raises(ModelFileError, match=r"cannot be compiled in .* MiB of memory"):
        ChatTemplate(" {{ x }}" * 16000)


def test_what_a_long_template_takes_itself_is_not_counted_against_conversations() -> None:
    source = "{% if missing %}" + "{{ a.b }}{% if c %}d{% endif %}" * 4000 + "{% endif %}" + SAID
    text = "x" * (8 << 20)
    assert ChatTemplate(source).render([Message("user", text)]) == f"{text};"


def test_the_time_that_a_template_sees_can_be_given() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    now = datetime(2031, 5, 4, 3, 2)
    assert template.render_values([], {}, now=now) == "2031-05-04 03:02"
    assert template.render_values([], {}).startswith(f"{datetime.now():%Y-}")


@pytest.mark.parametrize("value", [2**70, -(2**70), 1.5, "\ud800", "𝄞\0", True, None, [], {}])
def test_any_value_that_json_has_arrives_as_it_is(value: object) -> None:
    template = ChatTemplate("{{ value | tojson }}|{{ value }}")
    expected = f"{{'a': [{value!r}]}}"
    assert template.render([], value={"a": [value]}).partition("|")[2] == expected
