"""Imports point down only; a violation is named with its line."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "streamserve"
ROOT = PACKAGE.parent

# From the lowest up. A layer may import itself and those before it.
LAYERS = ("protocol", "dialects", "engine", "clients", "streams", "api", "asgi", "base", "web", "top")
BASE = ("conf.py", "conf_reader.py", "models.py", "managers.py", "keys.py")
FOLDERS = {"durable": "base", "migrations": "base", "management": "top", "templatetags": "top"}
WITHOUT_DJANGO = LAYERS[: LAYERS.index("base")]
DJANGO = {"django", "channels", "daphne", "asgiref"}
LIBRARIES = {
    "torch": "engine/model",
    "transformers": "engine",
    "tokenizers": "engine",
    "safetensors": "engine/model",
    "llguidance": "engine/grammar",
}
# These reach an engine through `clients` only, and share values with it through `protocol`; its config is a value too.
ABOVE_CLIENTS = {"streams", "api", "web", "asgi"}
NO_ASYNCIO = {"protocol", "dialects", "engine"}
MAX_FILES = 14
MAX_LINES = 400
MAX_FUNCTION_LINES = 40  # without the docstring
OURS = ("streamserve", "project", "tests", "benchmarks")


def python_files() -> Iterator[Path]:
    return (path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts)


def layer_of(path: Path) -> str:
    """Return the layer of a file."""
    first = path.relative_to(PACKAGE).parts[0]
    if first.endswith(".py"):
        return "base" if first in BASE else "top"
    return FOLDERS.get(first, first)


def layer_of_module(parts: list[str]) -> str:
    """Return the layer of `streamserve.<parts>`; "" for the package itself."""
    if not parts:
        return ""
    if (PACKAGE / parts[0]).is_dir():
        return FOLDERS.get(parts[0], parts[0])
    return "base" if f"{parts[0]}.py" in BASE else "top"


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import, those inside functions too; `from a import b` as a.b."""
    parents = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*parents[: -node.level], node.module or ""]) if node.level else str(node.module)
            yield from ((node.lineno, f"{base.rstrip('.')}.{alias.name}") for alias in node.names)


def complaint(layer: str, module: str, path: Path) -> str | None:
    """Return what is wrong with importing `module` in a file of `layer`, or None."""
    top, *rest = module.split(".")
    if top == "project":
        return "the app knows no project"
    if (
        top in DJANGO
        and layer in WITHOUT_DJANGO
        and not (top == "daphne" and path.is_relative_to(PACKAGE / "asgi/flow"))
    ):
        return "Django stays in base, web and top"
    if top in LIBRARIES and not path.is_relative_to(PACKAGE / LIBRARIES[top]):
        return f"{top} appears only in {LIBRARIES[top]}/"
    if top == "asyncio" and layer in NO_ASYNCIO:
        return f"asyncio never in {layer}/"
    if top == "streamserve" and rest != ["__version__"]:
        target = layer_of_module(rest)
        if target and LAYERS.index(target) > LAYERS.index(layer):
            return f"{layer} may not import {target}, which is above it"
        if layer in ABOVE_CLIENTS and target == "engine" and rest[:2] != ["engine", "config"]:
            return f"{layer} knows no engine: import from clients or protocol"
    return None


def violations() -> list[str]:
    out = []
    for path in python_files():
        for line, module in imports_of(path):
            wrong = complaint(layer_of(path), module, path)
            if wrong is not None:
                out.append(f"{path.relative_to(ROOT)}:{line} imports {module}: {wrong}")
    return out


def test_imports_point_down_only() -> None:
    """Every import of every file of the package points down."""
    assert violations() == []


def test_every_folder_is_known() -> None:
    """A new folder needs its place in LAYERS."""
    assert {layer_of(path) for path in python_files()} == set(LAYERS)


def large_folders(*names: str) -> dict[str, int]:
    """Return the folders below these of more than fourteen modules; migrations are not counted."""
    paths = (path.relative_to(ROOT) for name in names for path in (ROOT / name).rglob("*.py"))
    sizes = Counter(str(path.parent) for path in paths if path.parent.name != "migrations")
    return {folder: num for folder, num in sizes.items() if num > MAX_FILES}


def test_folders_stay_small() -> None:
    """No folder of ours holds more than fourteen modules."""
    assert large_folders(*OURS) == {}


def long_files(*names: str) -> set[str]:
    """Return the files below these folders of more than 400 lines."""
    paths = (path for name in names for path in (ROOT / name).rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) > MAX_LINES}


def test_files_stay_short() -> None:
    """No file of ours has more than 400 lines."""
    assert long_files(*OURS) == set()


def test_those_laws_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of fifteen modules and a file of 401 lines are named, and those that just fit are not."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for folder, num in (("tests/many", MAX_FILES + 1), ("tests/few", MAX_FILES), ("tests/migrations", MAX_FILES + 1)):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("__init__", *(f"test_{number}" for number in range(num - 1))):
            (tmp_path / folder / f"{name}.py").touch()
    (tmp_path / "tests/few/__init__.py").write_text("pass\n" * MAX_LINES)
    (tmp_path / "tests/many/__init__.py").write_text("pass\n" * (MAX_LINES + 1))
    assert large_folders("tests") == {"tests/many": MAX_FILES + 1}
    assert long_files("tests") == {"tests/many/__init__.py"}


def long_functions(path: Path) -> Iterator[str]:
    """Yield each function of more than MAX_FUNCTION_LINES."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
            if (node.end_lineno or 0) - node.lineno + 1 - docstring > MAX_FUNCTION_LINES:
                yield f"{path.relative_to(ROOT)} {node.name}"


def test_functions_stay_short() -> None:
    """A function of the package or the benchmarks has at most 40 lines."""
    paths = [*python_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    assert {one for path in paths for one in long_functions(path)} == set()


def test_that_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of 41 lines is named; one of 40 and a docstring is not."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    lines = ["    pass"] * (MAX_FUNCTION_LINES - 1)
    (tmp_path / "x.py").write_text(
        "\n".join(["def short():", '    """Law."""', *lines, "def tall():", *lines, "    pass"])
    )
    assert list(long_functions(tmp_path / "x.py")) == ["x.py tall"]


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ("streams", "django.db"),
        ("protocol", "asyncio"),
        ("engine", "streamserve.clients.base"),
        ("streams", "torch"),
        ("streams", "streamserve.conf"),
        ("streams", "streamserve.engine.sequence"),
        ("web", "streamserve.engine.core.EngineCore"),
        ("api", "streamserve.asgi.application"),
        ("web", "streamserve.admin"),
        ("top", "project.settings"),
    ],
)
def test_the_rules_can_fail(layer: str, module: str) -> None:
    """Each of these imports is a violation."""
    assert complaint(layer, module, PACKAGE / layer / "x.py") is not None


def test_only_conf_reads_settings_and_the_environment() -> None:
    """`os.environ`: a command, the tests' server, the hub's switch, OpenMP's, a key; `STREAMSERVE`: conf.py."""
    allowed = {
        "testing.py",
        "management/commands/streamserve_chat.py",
        "engine/model/load/source.py",
        "engine/model/openmp.py",
        "clients/remote/config.py",
    }
    for path in python_files():
        source = path.read_text()
        if str(path.relative_to(PACKAGE)) not in allowed:
            assert "os.environ" not in source, path
        if path.name not in {"conf.py", "testing.py"}:
            assert "settings.STREAMSERVE" not in source, path
