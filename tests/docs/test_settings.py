"""docs/settings.md names every key and every check there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from streamserve import checks
from streamserve.asgi.flow.config import FlowConfig
from streamserve.clients.process.config import ProcessConfig
from streamserve.conf import SiteConfig
from streamserve.engine.config import EngineConfig, LatencyClass, ModelConfig
from streamserve.protocol.limits import Limits
from streamserve.streams.config import StreamConfig

DOCS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize(
    "cls", [SiteConfig, EngineConfig, FlowConfig, LatencyClass, ModelConfig, ProcessConfig, Limits, StreamConfig]
)
def test_every_key_is_documented(cls: Any) -> None:
    """A new field needs its line."""
    text = DOCS.read_text()
    names = {field.name.upper() for field in dataclasses.fields(cls)} - {"ALIAS"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_every_check_is_documented() -> None:
    """And none that is not there."""
    ids = set(re.findall(r"streamserve\.[EW]\d{3}", Path(checks.__file__).read_text()))
    assert set(re.findall(r"streamserve\.[EW]\d{3}", DOCS.read_text())) == ids
