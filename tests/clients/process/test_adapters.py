"""An adapter's answers come from the engine process of its model, whose config names the adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.adapter import AdapterClient
from streamserve.clients.process.config import LaunchConfig, config_from_json, config_hash, config_to_json
from streamserve.engine.config import ModelConfig
from streamserve.protocol.errors import BadRequest
from tests.support.engines.engine_processes import ask, connected, end_engine, spec_in, token_ids

MODEL = ModelConfig(alias="echo", path="echo", adapters={"legal": "/srv/legal", "style": "/srv/style"})


@pytest.fixture
def spec(tmp_path: Path) -> LaunchConfig:
    return spec_in(tmp_path, model=MODEL)


def test_the_config_names_them(spec: LaunchConfig) -> None:
    """It reaches the process whole; with other adapters it is the config of another engine."""
    assert config_from_json(config_to_json(spec)) == spec
    other = replace(spec, model=replace(MODEL, adapters={"legal": "/srv/legal"}))
    assert config_hash(other) != config_hash(spec)


async def test_answers_are_by_the_adapter_that_is_named(spec: LaunchConfig) -> None:
    """Each in its own words, the same again; the prompt of an adapter that the engine does not have is refused."""
    async with connected(spec) as client:
        adapters = [AdapterClient(name, client) for name in ("legal", "style")]
        found = []
        for one in (client, *adapters, *adapters):
            found.append(token_ids([event async for event in await one.generate(ask())]))
        assert found[1:3] == found[3:5]
        assert len(set(found)) == 3
        described = adapters[0].describe()
        assert (described.alias, described.parent, described.state) == ("legal", "echo", "ready")
        with pytest.raises(BadRequest, match="has no adapter 'absent'") as refused:
            await AdapterClient("absent", client).generate(ask())
        assert refused.value.code == "model_not_found"
    end_engine(spec)
