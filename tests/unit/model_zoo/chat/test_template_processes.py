"""Templates render in separate processes with kernel limits, which end with their parent."""

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import Message
from model_zoo.chat.sandbox import renderer
from model_zoo.chat.sandbox.fork_server import ForkServer
from runtime.errors import ModelFileError, RequestError
from tests.checkout import ROOT
from tests.patience import HANG_S

SAID = "{% for m in messages %}{{ m.content }};{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def children(pid: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            facts = (process / "stat").read_text().rpartition(")")[2].split()
            found += [int(process.name)] * (int(facts[1]) == pid)
    return found


def rendering_processes() -> list[int]:
    """Process ids of the fork server of this process and of the processes that it forked."""
    forking = [
        child
        for child in children(os.getpid())
        if "model_zoo.chat.sandbox" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return [*forking, *(forked for child in forking for forked in children(child))]


def wait_for_the_end_of(pids: list[int]) -> None:
    """Of processes that need not be children of this one."""
    for pid in pids:
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            ended, _, _ = select.select([process], [], [], HANG_S)
            os.close(process)
            assert ended, f"process {pid} runs on"


def run_python(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, **options
    )


def test_concurrent_renderings_do_not_mix_texts() -> None:
    template = ChatTemplate(SAID)

    def rendered(number: int) -> str:
        return template.render([Message("user", f"{number} ") for _ in range(number % 50)])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rendered, range(400))) == [
            f"{number} ;" * (number % 50) for number in range(400)
        ]


def test_the_server_of_templates_is_started_once() -> None:
    server = ForkServer()
    before = rendering_processes()
    server.start()
    (started,) = set(rendering_processes()) - set(before)
    server.start()
    connection, pid = server.connect()
    with connection:
        assert set(rendering_processes()) - set(before) == {started, pid}
    del server
    wait_for_the_end_of([started, pid])


def test_killed_processes_are_replaced() -> None:
    template = ChatTemplate(SAID)
    for _ in range(2):
        assert template.render([Message("user", "Hello")]) == "Hello;"
        killed = rendering_processes()
        assert len(killed) >= 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for_the_end_of(killed)


def test_a_template_works_after_a_rendering_that_exceeded_its_time() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}" + SAID)
    for _ in range(2):
        with pytest.raises(RequestError, match="processor time"):
            template.render([Message("user", "Hello")] * 2)
        assert template.render([Message("user", "Hello")]) == "Hello;"


def test_a_template_works_after_a_rendering_that_exceeded_its_memory() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'a' * 10**9 }}{% endif %}" + SAID)
    for _ in range(2):
        with pytest.raises(RequestError, match="MiB of memory"):
            template.render([Message("user", "Hello")] * 2)
        assert template.render([Message("user", "Hello")]) == "Hello;"


def test_a_template_with_too_long_a_result_is_refused() -> None:
    with pytest.raises(RequestError, match="bytes of text"):
        ChatTemplate("{{ 'a' * 10**6 }}").render([Message("user", "Hello")])


def test_a_process_with_lowered_priority_renders_no_second_time(monkeypatch) -> None:
    monkeypatch.setattr(renderer, "_NORMAL_PRIORITY_MS", 0)
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


def test_a_fork_of_this_process_uses_its_own_rendering_processes() -> None:
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


def test_rendering_processes_end_when_their_parent_is_killed() -> None:
    script = (
        "import signal\n"
        "from model_zoo.chat.chat_template import ChatTemplate\n"
        "from model_zoo.chat.messages import Message\n"
        "from tests.unit.model_zoo.chat.test_template_processes import SAID, rendering_processes\n"
        "templates = [ChatTemplate(SAID) for _ in range(3)]\n"
        "print(*rendering_processes(), flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 4
    wait_for_the_end_of(pids)


def test_dropping_a_template_ends_its_processes() -> None:
    kept = ChatTemplate(SAID)
    before = set(rendering_processes())
    dropped = ChatTemplate(SAID)
    new = set(rendering_processes()) - before
    assert len(new) == 1
    del dropped
    wait_for_the_end_of([*new])
    assert kept.render([Message("user", "Hello")]) == "Hello;"


def test_the_fork_server_imports_no_large_library() -> None:
    script = (
        "import sys, model_zoo.chat.sandbox.render_server\n"
        "print({'torch', 'numpy', 'ray', 'subprocess', 'asyncio'} & set(sys.modules) or 'none')"
    )
    assert run_python(script).stdout == "none\n"


def test_the_fork_server_finds_modules_of_an_editable_installation() -> None:
    """An import hook finds these modules, not `sys.path`."""
    script = (
        "import sys\n"
        "from model_zoo.chat.chat_template import ChatTemplate\n"
        "from model_zoo.chat.messages import Message\n"
        f"sys.path = [path for path in sys.path if path not in ('', {str(ROOT)!r})]\n"
        "print(ChatTemplate('{{ messages[0].content }}').render([Message('user', 'found')]))"
    )
    done = run_python(script)
    assert done.stdout == "found\n", done.stderr


LIMITED = (
    "from model_zoo.chat.sandbox.frames import RenderLimits\n"
    "from model_zoo.chat.sandbox.kernel_limits import accept_limits, address_space_bytes, limited\n"
    "accept_limits()\n"
    "with limited(RenderLimits({seconds}, 64 << 20, 0), idle_bytes=address_space_bytes()):\n"
    "    {work}\n"
)


def test_the_time_limit_interrupts_a_single_call_into_c() -> None:
    work = "('…' * 9999999).strip('Ħ' * 9999999 + '…')"
    done = run_python(LIMITED.format(seconds=0.01, work=work))
    assert done.returncode == -signal.SIGPROF


def test_only_memory_beyond_the_limit_is_an_error() -> None:
    done = run_python(LIMITED.format(seconds=60, work="bytearray(32 << 20); bytearray(96 << 20)"))
    assert "MemoryError" in done.stderr
    done = run_python(LIMITED.format(seconds=60, work="bytearray(32 << 20); print('done')"))
    assert done.stdout == "done\n"


def test_compiling_is_limited_too() -> None:
    """A source below the limit of characters that Jinja compiles to unusually much code."""
    with pytest.raises(ModelFileError, match=r"cannot be compiled in .* MiB of memory"):
        ChatTemplate(" {{ x }}" * 16000)


def test_memory_of_a_long_template_does_not_count_for_conversations() -> None:
    source = "{% if missing %}" + "{{ a.b }}{% if c %}d{% endif %}" * 4000 + "{% endif %}" + SAID
    text = "x" * (8 << 20)
    assert ChatTemplate(source).render([Message("user", text)]) == f"{text};"


def test_the_time_for_a_template_can_be_set() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    now = datetime(2031, 5, 4, 3, 2)
    assert template.render_values([], {}, now=now) == "2031-05-04 03:02"
    assert template.render_values([], {}).startswith(f"{datetime.now():%Y-}")


@pytest.mark.parametrize("value", [2**70, -(2**70), 1.5, "\ud800", "𝄞\0", True, None, [], {}])
def test_json_values_reach_the_template_unchanged(value: object) -> None:
    template = ChatTemplate("{{ value | tojson }}|{{ value }}")
    expected = f"{{'a': [{value!r}]}}"
    assert template.render([], value={"a": [value]}).partition("|")[2] == expected
