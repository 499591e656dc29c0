"""Rules that no linter checks; the import contracts are in pyproject.toml."""

import ast
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.checkout import ROOT

PACKAGES = ("runtime", "model_zoo", "serve_app")
# What `model_zoo` may reach of `runtime`: kernels, and the contract between models and engine.
CONTRACT = (
    "runtime.distributed.layer_placement",
    "runtime.distributed.ranks",
    "runtime.engine.request",
    "runtime.errors",
    "runtime.home_directory",
    "runtime.kernels",
    "runtime.kv.cache_types",
    "runtime.kv.cache_kinds",
    "runtime.kv.cache_layout",
    "runtime.kv.states",
    "runtime.mapped_removal",
    "runtime.quant",
    "runtime.vision.encoder",
    "runtime.vision.step_gate",
    "runtime.worker.model",
)
RAY_FILES = {
    "serve_app/api/ingress_deployment.py",
    "serve_app/app.py",
    "serve_app/autoscaling/serve_policy.py",
    "serve_app/cli/ray_serve.py",
    "serve_app/deployments/model_deployments.py",
    "serve_app/gateway/cluster.py",
    "serve_app/replica/rank_actors.py",
    "serve_app/responses/response_store_deployment.py",
    "serve_app/routing/listing_router.py",
    "serve_app/routing/named_replicas.py",
    "serve_app/routing/replica_set.py",
    "serve_app/telemetry/ray_meter.py",
}
FAMILIES = "model_zoo/models"  # whose modules and classes have the same names in every family
COMMANDS = "serve_app/cli"  # whose modules are named after the commands
# Folders whose modules do the same for different parents, and have the same names.
MIRRORED = (
    {"runtime/kernels", "runtime/kernels/triton", "model_zoo/layers"},
    {"runtime/quant/formats", "model_zoo/convert/quantizers"},
    {"model_zoo/tokenizers", "model_zoo/convert/vocabularies"},
)
# Methods of collections that change them, and others that return the next of several values.
CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "next", "pop", "popitem"),
    *("popleft", "read", "remove", "setdefault", "update", "write"),
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50

IMPORT_WITHOUT_LIBRARIES = """
import importlib, sys

hidden = sys.argv[1].split(",")

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hide())
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, folders
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[str]:
    """The full names of a file's imports, `from a import b` as `a.b`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def reached_from(paths: Iterable[Path], packages: tuple[str, ...]) -> set[Path]:
    """These files and those of `packages` that they import, directly or not."""
    reached, waiting = set(), set(paths)
    while waiting:
        reached.add(path := waiting.pop())
        names = [name.replace(".", "/") for name in imports_of(path) if within(name, packages)]
        files = (ROOT / f"{each}.py" for name in names for each in (name, os.path.dirname(name)))
        waiting |= {file for file in files if file.exists()} - reached
    return reached


def module_of(path: Path) -> str:
    return named(path).removesuffix(".py").replace("/", ".")


def pure_core() -> tuple[str, ...]:
    """The modules that mypy checks strictly."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    (strict,) = (each for each in settings["overrides"] if each.get("disallow_untyped_defs"))
    return tuple(strict["module"])


def imported_without(libraries: str, *modules: str) -> str:
    """The error of importing the modules in a process of their own, where the libraries are
    missing; "" if there is none."""
    command = [sys.executable, "-c", IMPORT_WITHOUT_LIBRARIES, libraries, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def test_pure_core_imports_the_standard_library_and_itself_only() -> None:
    core = pure_core()
    others = {
        f"{module}: {name}"
        for module in core
        for name in imports_of(ROOT / f"{module.replace('.', '/')}.py")
        if name.partition(".")[0] not in sys.stdlib_module_names and not within(name, core)
    }
    assert {"runtime.engine.scheduler", "serve_app.routing.policy"} <= set(core)
    assert others == set()


def test_model_zoo_reaches_the_contract_with_the_engine_only() -> None:
    reached = map(module_of, reached_from(sources("model_zoo"), ("model_zoo", "runtime")))
    runtime = {name for name in reached if within(name, ("runtime",))}
    assert "runtime.kv.cache_types" in runtime  # which only modules of the contract import
    assert {name for name in runtime if not within(name, CONTRACT)} == set()


def test_ingress_and_a_server_without_configured_models_start_without_torch() -> None:
    """torch costs each ingress and response store 1.8 s of processor time and 185 MB. A server is
    checked before Ray starts, and built again by Serve."""
    started = ("api.ingress_deployment", "responses.response_store_deployment")
    built = ("cli.serve", "app")
    assert imported_without("torch", *(f"serve_app.{each}" for each in started + built)) == ""
    # The same must fail for a module that needs torch, or nothing is hidden.
    assert "torch is hidden" in imported_without("torch", "runtime.worker.model")


def test_the_tests_of_the_benchmark_need_no_llama_cpp() -> None:
    """`make test` installs what tests need; only `make bench` and tests/peers need llama.cpp."""
    reached = reached_from(sources("tests/unit/bench"), ("bench",))
    needing = {named(path) for path in sources("bench") if "llama_cpp" in imports_of(path)}
    assert "bench/peer.py" in needing and "bench/ours.py" in {named(path) for path in reached}
    assert needing.isdisjoint(named(path) for path in reached)


def test_ray_is_imported_in_few_files_of_serve_app_only() -> None:
    importing = {
        named(path)
        for path in sources(*PACKAGES)
        if any(within(name, ("ray",)) for name in imports_of(path))
    }
    assert importing - RAY_FILES == set()
    assert "serve_app/deployments/model_deployments.py" in importing


def test_no_private_ray_attribute_is_used() -> None:
    private = [
        f"{named(path)}: {name}"
        for path in sources("serve_app")
        for name in imports_of(path)
        if within(name, ("ray",)) and any(part.startswith("_") for part in name.split("."))
    ]
    assert private == []


def test_package_init_files_are_empty() -> None:
    full = [named(path) for path in sources(*PACKAGES) if path.name == "__init__.py"]
    assert [name for name in full if (ROOT / name).read_text().strip()] == []


def test_every_module_has_a_docstring() -> None:
    missing = [
        named(path)
        for path in sources(*PACKAGES, "bench", "tools")
        if path.name != "__init__.py" and not ast.get_docstring(parsed(path))
    ]
    assert missing == []


def test_no_two_modules_have_the_same_name() -> None:
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for path in sources(*PACKAGES):
        folder = named(path.parent)
        if path.name != "__init__.py" and folder != COMMANDS and not folder.startswith(FAMILIES):
            folders[path.stem].add(folder)
    assert {"runtime/kernels", "model_zoo/layers"} <= folders["attention"]
    twins = {stem: found for stem, found in folders.items() if len(found) > 1}
    assert {s: f for s, f in twins.items() if not any(f <= group for group in MIRRORED)} == {}


def test_no_two_public_classes_have_the_same_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(*PACKAGES):
        if not named(path).startswith(FAMILIES):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(named(path))
    assert places["ChatBody"] == ["serve_app/api/ollama.py"]
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_assert_changes_anything() -> None:
    """`python -O` leaves asserts out."""
    changing = [
        f"{named(path)}:{node.lineno}"
        for path in sources(*PACKAGES)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert) and any(map(changes_state, ast.walk(node)))
    ]
    assert changing == []
    assert any(map(changes_state, ast.walk(ast.parse("assert seen.pop(1) is None"))))


def changes_state(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        return getattr(called, "attr", getattr(called, "id", None)) in CHANGING
    return isinstance(node, ast.NamedExpr | ast.Await | ast.Yield)


def test_files_are_not_too_long() -> None:
    lengths = {
        named(path): len(path.read_text().splitlines())
        for path in sources(*PACKAGES, "bench", "tools", "tests")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_not_too_long_except_kernels() -> None:
    long = {
        f"{named(path)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in sources(*PACKAGES, "bench", "tools")
        if not named(path).startswith("runtime/kernels/")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}
