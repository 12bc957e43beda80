"""Imports point down only, and never in a circle; a violation is named with its line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.map import circles, imports, read_modules

PACKAGE = Path(__file__).resolve().parent.parent / "streamserve"
ROOT = PACKAGE.parent

# From the lowest up. A layer may import itself and those before it.
LAYERS = (
    "protocol",
    "tracing",
    "dialects",
    "native",
    "engine",
    "clients",
    "streams",
    "api",
    "asgi",
    "loadtest",
    "base",
    "work",
    "web",
    "top",
)
BASE = ("conf.py", "conf_reader.py", "models.py", "keys.py", "signals.py")
FOLDERS = {
    "admin": "top",
    "rows": "base",
    "migrations": "base",
    "doctor": "top",
    "management": "top",
    "templatetags": "top",
}
WITHOUT_DJANGO = LAYERS[: LAYERS.index("base")]
DJANGO = {"django", "channels", "daphne", "asgiref"}
LIBRARIES = {
    "torch": "engine/model",
    "transformers": "engine",
    "tokenizers": "engine",
    "sentence_transformers": "engine/model",
    "safetensors": "engine/model",
    "llguidance": "engine/grammar",
    "opentelemetry": "tracing",
}
# These reach an engine through `clients` only, and share values with it through `protocol`; its config is a value too.
ABOVE_CLIENTS = {"streams", "api", "asgi", "work", "web"}
NO_ASYNCIO = {"protocol", "tracing", "dialects", "native", "engine"}


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
        return "Django stays in base, work, web and top"
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


def test_no_modules_import_each_other() -> None:
    """No circle, directly or by others, imports for types and inside functions counted."""
    assert circles(imports(read_modules())) == []


def test_every_folder_is_known() -> None:
    """A new folder needs its place in LAYERS."""
    assert {layer_of(path) for path in python_files()} == set(LAYERS)


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
        ("base", "streamserve.work.worker"),
        ("work", "streamserve.web.site"),
        ("web", "streamserve.admin"),
        ("top", "project.settings"),
    ],
)
def test_the_rules_can_fail(layer: str, module: str) -> None:
    """Each of these imports is a violation."""
    assert complaint(layer, module, PACKAGE / layer / "x.py") is not None


def test_only_conf_reads_settings_and_the_environment() -> None:
    """`os.environ`: a command, the tests' server, the hub's switch, OpenMP's, CXX, a key; `STREAMSERVE`: conf.py."""
    allowed = {
        "testing.py",
        "management/commands/streamserve_chat.py",
        "management/commands/streamserve_load.py",
        "engine/model/load/source.py",
        "engine/model/openmp.py",
        "native/build.py",
        "clients/remote/config.py",
    }
    for path in python_files():
        source = path.read_text()
        if str(path.relative_to(PACKAGE)) not in allowed:
            assert "os.environ" not in source, path
        if path.name not in {"conf.py", "testing.py"}:
            assert "settings.STREAMSERVE" not in source, path
