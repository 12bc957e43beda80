"""docs/settings.md names every key and every check there is, and the default of each key."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from streamserve import checks
from streamserve.asgi.flow.transport import FlowConfig
from streamserve.clients.process.config import ProcessConfig
from streamserve.clients.remote.config import RemoteConfig
from streamserve.conf import SiteConfig
from streamserve.engine.config import CLASSES, EngineConfig, LatencyClass, ModelConfig
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import PREFILL_ONLY
from streamserve.streams.config import BatchConfig, JobConfig, StreamConfig

DOCS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
_ROW = re.compile(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \| (.+?) \|", re.MULTILINE)


CLASSES_OF_KEYS = [
    *(SiteConfig, EngineConfig, FlowConfig, LatencyClass, ModelConfig, RemoteConfig),
    *(ProcessConfig, Limits, StreamConfig, BatchConfig, JobConfig),
]


@pytest.mark.parametrize("cls", CLASSES_OF_KEYS)
def test_every_key_is_documented(cls: Any) -> None:
    """A new field needs its line."""
    text = DOCS.read_text()
    names = {field.name.upper() for field in dataclasses.fields(cls)} - {"ALIAS", "POLICY"}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.parametrize(
    ("heading", "cls", "unlike"),
    [
        ("`FLOW`", FlowConfig, set()),
        ("`MODELS`", ModelConfig, {"ALIAS", "PATH", "ANSWERS"}),  # ANSWERS: of a site's model, {}
        ("A model elsewhere", RemoteConfig, {"ALIAS", "URL"}),
        ("`ENGINE`", EngineConfig, {"CLASSES", "POLICY"}),
        ("`STREAMS`", StreamConfig, {"ENGINE_WAIT_SECONDS"}),  # made of the drain's
        ("`LIMITS`", Limits, set()),
        ("`BATCHES`", BatchConfig, set()),
        ("`JOBS`", JobConfig, set()),
        ("Engines", ProcessConfig, set()),
    ],
)
def test_defaults_are_those_of_the_code(heading: str, cls: Any, unlike: set[str]) -> None:
    """Each key of a section has the default of its field."""
    in_code = {field.name.upper(): field.default for field in dataclasses.fields(cls)}
    in_docs = _defaults(heading)
    assert {key: in_docs.get(key) for key in in_code.keys() - unlike} == {
        key: value for key, value in in_code.items() if key not in unlike
    }


def test_defaults_of_the_site_are_those_of_the_code() -> None:
    """The keys of the first table that are plain values."""
    in_code = {field.name.upper(): field.default for field in dataclasses.fields(SiteConfig)}
    plain = {
        key: value for key, value in in_code.items() if isinstance(value, (bool, float)) or key in ("CLIENT", "LOG")
    }
    in_docs = _defaults("Settings")
    assert {key: in_docs.get(key) for key in plain} == {**plain, "ENGINE_AUTOSTART": None}


def test_defaults_of_classes_are_those_of_the_code() -> None:
    """Each class has its column."""
    section = _section("`CLASSES`")
    names = re.findall(r"`(\w+)`", section[section.index("| key |") :].partition("\n")[0])
    rows = re.findall(r"^\| `([A-Z_]+)` ((?:\| `[\w.]+` )+)\|", section, re.MULTILINE)
    in_docs = {key: [ast.literal_eval(value) for value in re.findall(r"`([\w.]+)`", row)] for key, row in rows}
    fields = dataclasses.fields(LatencyClass)
    assert names == [name for name in CLASSES if name != PREFILL_ONLY]
    assert in_docs == {field.name.upper(): [getattr(CLASSES[name], field.name) for name in names] for field in fields}


def _section(heading: str) -> str:
    return re.split(rf"^##? {re.escape(heading)}\n", DOCS.read_text(), flags=re.MULTILINE)[1].partition("\n## ")[0]


def _defaults(heading: str) -> dict[str, Any]:
    """Return the defaults of a section's table; keys whose default is described are left out."""
    out: dict[str, Any] = {}
    for keys, defaults in _ROW.findall(_section(heading)):
        names, values = re.findall(r"`(\w+)`", keys), re.findall(r"`([^`]+)`", defaults)
        try:
            out |= zip(names, map(ast.literal_eval, values), strict=True)
        except (SyntaxError, ValueError):
            continue
    return out


def test_every_check_is_documented() -> None:
    """And none that is not there."""
    ids = set(re.findall(r"streamserve\.[EW]\d{3}", Path(checks.__file__).read_text()))
    assert set(re.findall(r"streamserve\.[EW]\d{3}", DOCS.read_text())) == ids
