"""`project/install.py`: which build of PyTorch a machine gets. Nothing is downloaded: indexes are folders."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from project import install

pytestmark = pytest.mark.proof

CPU = ["--index-url", "https://download.pytorch.org/whl/cpu"]
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default build is no CUDA build")


@pytest.fixture
def unconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without a configuration file, and without its variables."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def index_with(folder: Path, version: str) -> str:
    """Make a package index of one wheel, torch of that version; return its address."""
    package = folder / "simple" / "torch"
    package.mkdir(parents=True)
    name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(package / name, "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (package / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return (folder / "simple").as_uri()


@ON_LINUX
@pytest.mark.usefixtures("unconfigured")
def test_a_machine_without_a_gpu_gets_the_cpu_build() -> None:
    """From the index that pytorch.org documents; a machine with a GPU gets the default build."""
    config = install._pip_config(Path(sys.executable))
    assert install.torch_index(config, gpu=False) == CPU
    assert install.torch_index(config, gpu=True) == []


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIP_INDEX_URL", "https://pypi.example/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://pypi.example/simple"),
        ("PIP_FIND_LINKS", "/srv/wheels"),
        ("PIP_NO_INDEX", "1"),
    ],
)
def test_an_index_of_ones_own_is_used(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pip's configuration says where packages come from, PyTorch comes from there too."""
    monkeypatch.setenv(name, value)
    assert install.torch_index(install._pip_config(Path(sys.executable)), gpu=False) == []


@pytest.mark.usefixtures("unconfigured")
def test_an_index_in_a_configuration_file_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip config set` writes it; other settings change nothing."""
    file = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    found = []
    for line in ("index-url = https://pypi.example/simple", "timeout = 60"):
        file.write_text(f"[global]\n{line}\n")
        found.append("index-url" in install._pip_config(Path(sys.executable)))
        is_left_alone = install.torch_index(install._pip_config(Path(sys.executable)), gpu=False) == []
        assert is_left_alone == (found[-1] or sys.platform != "linux")
    assert found == [True, False]


def test_a_driver_shows_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's or AMD's device, or nvidia-smi in the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not install.has_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert install.has_gpu(tmp_path)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert install.has_gpu(tmp_path / "elsewhere")


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize(("version", "build"), [("99.0.0+cpu", "CPU build"), ("99.0.0", "the default build")])
def test_the_build_and_its_size_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, build: str
) -> None:
    """Before anything is downloaded; an index that does not have it announces nothing."""
    index = index_with(tmp_path, version)
    wheels = install._resolve(Path(sys.executable), "torch==99.0.0", "--index-url", index)
    assert install._announce(wheels)
    assert f"PyTorch {version} ({build}" in capsys.readouterr().out
    assert not install._announce(install._resolve(Path(sys.executable), "torch==98.0.0", "--index-url", index))
    assert capsys.readouterr().out == ""


@ON_LINUX
@pytest.mark.usefixtures("unconfigured")
def test_the_cpu_build_is_installed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its index, without what it asks for; a venv that has the pinned torch is left as it is."""
    monkeypatch.setattr(install, "CPU_INDEX", index_with(tmp_path, "99.0.0+cpu"))
    monkeypatch.setattr(install, "_GPU_FILES", ())
    monkeypatch.setenv("PATH", "")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    pins = tmp_path / "requirements.txt"
    pins.write_text("torch==99.0.0\n")
    install._install_torch(python, [pins])
    assert install._has_torch(python, "torch==99.0.0")
    monkeypatch.setattr(install, "CPU_INDEX", "file:///no/such/index")
    install._install_torch(python, [pins])
