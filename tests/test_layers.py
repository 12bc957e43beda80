"""DESIGN.md 3: imports point down only. Names the line that breaks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "streamserve"
ROOT = PACKAGE.parent

# From the ground up. A layer may import its own and those before it.
LAYERS = ("protocol", "dialects", "engine", "clients", "streams", "asgi")
DJANGO_ROOMS = ("management", "migrations", "templatetags")
DJANGO = {"django", "channels", "daphne", "asgiref"}
LIBRARIES = {"torch": "engine/model", "transformers": "engine", "tokenizers": "engine", "safetensors": "engine/model"}
NO_ASYNCIO = {"protocol", "dialects", "engine"}


def python_files() -> Iterator[Path]:
    return (path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts)


def room_of(path: Path) -> str:
    """Return the layer a file is in; "" for a file directly in streamserve/, and for Django's own folders."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first.endswith(".py") or first in DJANGO_ROOMS else first


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import, those inside functions too; `from a import b` as a.b."""
    parents = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*parents[: -node.level], node.module or ""]) if node.level else str(node.module)
            yield from ((node.lineno, f"{base.rstrip('.')}.{alias.name}") for alias in node.names)


def complaint(room: str, module: str, path: Path) -> str | None:
    """Return what is wrong with importing `module` in a file of `room`, or None."""
    top, *rest = module.split(".")
    if top == "project":
        return "the app knows no project"
    if room and top in DJANGO and not (top == "daphne" and path.match("asgi/flow_*.py")):
        return "only files directly in streamserve/ may import Django"
    if top in LIBRARIES and not path.is_relative_to(PACKAGE / LIBRARIES[top]):
        return f"{top} appears only in {LIBRARIES[top]}/"
    if top == "asyncio" and room in NO_ASYNCIO:
        return f"asyncio never in {room}/"
    if top == "streamserve" and room and rest != ["__version__"]:
        target = rest[0] if rest else ""
        if target not in LAYERS:
            return "a subpackage may not import the Django skin"
        if LAYERS.index(target) > LAYERS.index(room):
            return f"{room}/ may not import {target}/, which is above it"
    return None


def violations() -> list[str]:
    out = []
    for path in python_files():
        for line, module in imports_of(path):
            wrong = complaint(room_of(path), module, path)
            if wrong is not None:
                out.append(f"{path.relative_to(ROOT)}:{line} imports {module}: {wrong}")
    return out


def test_imports_point_down_only() -> None:
    """Every file of the package, every import."""
    assert violations() == []


def test_every_room_is_known() -> None:
    """A new folder needs its place in LAYERS (and in DESIGN.md)."""
    rooms = {room_of(path) for path in python_files()} - {""}
    assert rooms == set(LAYERS)


@pytest.mark.parametrize(
    ("room", "module"),
    [
        ("streams", "django.db"),
        ("protocol", "asyncio"),
        ("engine", "streamserve.clients.base"),
        ("streams", "torch"),
        ("streams", "streamserve.conf"),
        ("", "project.settings"),
    ],
)
def test_the_rules_can_fail(room: str, module: str) -> None:
    """A rule that lets these pass is no rule."""
    path = PACKAGE / room / "x.py" if room else PACKAGE / "x.py"
    assert complaint(room, module, path) is not None


def test_nobody_below_reads_settings_or_the_environment() -> None:
    """`os.environ`: a command, the tests' server, the hub's switch, OpenMP's; `STREAMSERVE`: conf.py."""
    allowed = {"testing.py", "streamserve_chat.py", "source.py", "apps.py"}
    for path in python_files():
        source = path.read_text()
        if path.name not in allowed:
            assert "os.environ" not in source, path
        if path.name not in {"conf.py", "testing.py"}:
            assert "settings.STREAMSERVE" not in source, path
