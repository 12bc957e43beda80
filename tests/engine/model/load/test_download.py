"""Downloading a hub id from a hub on loopback: progress in bytes, resume after a cut, cancelled without a client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.events import Done
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from tests.support.engines.clients import collect
from tests.support.engines.engine_processes import end_engine
from tests.support.servers.hub_server import Hub, files_of, hub_of

HELPDESK = Path(__file__).resolve().parents[4] / "project" / "demo_model" / "helpdesk"
MIB = 1024 * 1024
WEIGHTS = bytes(range(256)) * (25 * MIB // 256)  # the hub library writes 10 MiB at a time, and resumes there
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "model.bin": b"never asked for"}

DOWNLOAD = """
import hashlib, json, sys
from streamserve.engine.model.load.source import ModelLoadError, resolve

class Gone(Exception): ...

def progress(*report):
    reports.append(report)
    if sys.argv[1] == "gone" and report[2] > 10_000_000:
        raise Gone

reports = []
try:
    folder = resolve("org/model", progress=progress)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    print(json.dumps([files, reports]))
except Gone:
    print(json.dumps("gone"))
except ModelLoadError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_of(FILES) as hub:
        yield hub


def digest(name: str) -> str:
    return hashlib.sha256(FILES[name]).hexdigest()


def download(hub: Hub, home: Path, how: str = "whole") -> Any:
    command = [sys.executable, "-c", DOWNLOAD, how]
    done = subprocess.run(command, env=hub.environment(home), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_download_reports_its_bytes(hub: Hub, tmp_path: Path) -> None:
    """The needed files are downloaded, and no other; the bytes grow up to the total."""
    files, reports = download(hub, tmp_path)
    total = len(FILES["config.json"]) + len(WEIGHTS)
    assert files == {name: digest(name) for name in ("config.json", "model.safetensors")}
    assert {report[0] for report in reports} == {"download"}
    assert reports[-1] == ["download", 1.0, total, total]
    loaded = [report[2] for report in reports]
    assert loaded == sorted(loaded)


def test_a_download_can_be_given_up(hub: Hub, tmp_path: Path) -> None:
    """An exception that progress raises passes through unchanged: it is no failure of the hub."""
    assert download(hub, tmp_path, "gone") == "gone"


def test_a_download_that_is_cut_resumes(hub: Hub, tmp_path: Path) -> None:
    """A connection that breaks is made again with a Range, and the file is whole; no byte is counted twice."""
    hub.cuts["model.safetensors"] = [11 * MIB, 12 * MIB]
    files, reports = download(hub, tmp_path)
    assert files["model.safetensors"] == digest("model.safetensors")
    assert hub.ranges("model.safetensors") == ["", f"bytes={10 * MIB}-", f"bytes={20 * MIB}-"]
    assert reports[-1][1:] == [1.0, len(WEIGHTS) + 2, len(WEIGHTS) + 2]
    assert max(report[2] for report in reports) == len(WEIGHTS) + 2


def test_a_download_that_was_given_up_keeps_whole_files(hub: Hub, tmp_path: Path) -> None:
    """Another process takes what is whole; the file that was under way begins again (so does the hub library)."""
    assert download(hub, tmp_path, "gone") == "gone"
    files, _ = download(hub, tmp_path)
    assert files["model.safetensors"] == digest("model.safetensors")
    assert (len(hub.ranges("config.json")), hub.ranges("model.safetensors")) == (1, ["", ""])


def test_a_hub_without_ranges_is_asked_anew(hub: Hub, tmp_path: Path) -> None:
    """The whole file in answer to a Range replaces what there was."""
    hub.cuts["model.safetensors"], hub.ignores_ranges = [11 * MIB], True
    files, _ = download(hub, tmp_path)
    assert files["model.safetensors"] == digest("model.safetensors")
    assert hub.ranges("model.safetensors") == ["", f"bytes={10 * MIB}-"]


def test_a_hub_that_lacks_the_model_is_a_load_error(hub: Hub, tmp_path: Path) -> None:
    """The message names the model, and what may be wrong."""
    hub.model_id = "org/other"
    kind, message = download(hub, tmp_path)
    assert kind in ("ModelNotFound", "HubUnreachable")
    assert "org/model" in message


async def test_a_model_is_downloaded_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a hub id to an answer: what is loading shows how far the download is; it is cut once in the middle."""
    files = files_of(HELPDESK)
    half = len(files["model.safetensors"]) // 2
    with hub_of(files, cuts={"model.safetensors": [half]}) as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        model = ModelConfig(alias="m", path="org/model", dtype="float32", device="cpu", num_threads=1)
        config = LaunchConfig(
            model=model,
            engine=EngineConfig(num_blocks=64),
            site=str(tmp_path),
            state_dir=str(tmp_path),
            runtime_dir=str(tmp_path / "run"),
        )
        client = ProcessClient(config)
        try:
            hub.go.clear()
            client.start()
            # The hub library adds a file to the total when it begins it, so the first report may show all of it.
            seen = await shown(client, lambda: client.describe().stage == "download")
            hub.go.set()
            assert 0 < seen.loaded_bytes <= seen.total_bytes
            await shown(client, lambda: client.describe().state in ("ready", "failed"))
            assert client.describe().state == "ready", client.describe().message
            request = GenerateRequest(model="m", prompt="Hello", sampling=SamplingParams(max_tokens=3, ignore_eos=True))
            events = await collect(await client.generate(request))  # type: ignore[arg-type]
        finally:
            await client.aclose()
            end_engine(config)
    assert isinstance(events[-1], Done)
    assert len(hub.ranges("model.safetensors")) == 2


async def shown(client: ProcessClient, condition: Any) -> ModelDescription:
    """Return the description at the first moment at which the condition holds."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  # the state of another process
            await asyncio.sleep(0.005)
    return client.describe()
