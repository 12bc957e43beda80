"""Packed weights that are kept are taken as they were. A file that is not whole, ours and of this key is made anew."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from streamserve.engine.model.linear import packs as module
from streamserve.engine.model.linear.native import NativeLinear, quantize
from streamserve.engine.model.linear.packs import Packs
from streamserve.native.build import build
from streamserve.native.levels import best_level
from streamserve.native.library import Library
from tests.native.conftest import library  # noqa: F401  (a fixture)
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

NUM_LAYERS = 3
KINDS = ("int4", "int8")


def opened(folder: Path, native: Library, *fields: str, model: str = "model") -> Packs:
    return Packs(folder / "packs", model, fields, native, torch.float32)


def made(folder: Path, native: Library, *fields: str, model: str = "model") -> list[NativeLinear]:
    """Keep a few layers; return them."""
    packs = opened(folder, native, *fields, model=model)
    layers = [quantize(native, kind, torch.randn(50, 70), None) for kind in ("int8", "int4", "int8")]
    for number, layer in enumerate(layers):
        packs.add(f"layer {number}", layer)
    packs.add_tensor("reference", torch.arange(6.0).view(2, 3))
    packs.save()
    return layers


def taken(packs: Packs) -> list[NativeLinear | None]:
    return [packs.layer(f"layer {number}", None) for number in range(NUM_LAYERS)]


def test_layers_come_back_bit_for_bit(tmp_path: Path, library: Library) -> None:  # noqa: F811
    """Kinds, shapes, bytes and tensors; the file and its folder are this user's alone."""
    wanted = made(tmp_path, library)
    packs = opened(tmp_path, library)
    for layer, found in zip(wanted, taken(packs), strict=True):
        assert found is not None
        assert (found.kind, found.out_features, found.in_features) == (layer.kind, 50, 70)
        assert torch.equal(found.packed, layer.packed)
    reference = packs.tensor("reference")
    assert reference is not None
    assert torch.equal(reference, torch.arange(6.0).view(2, 3))
    assert packs.layer("another", None) is None
    assert packs.file.stat().st_mode & 0o777 == 0o400
    assert packs.file.parent.stat().st_mode & 0o777 == 0o700
    before = packs.file.stat().st_mtime_ns
    packs.save()  # nothing was added
    assert packs.file.stat().st_mtime_ns == before


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    file.chmod(0o600)
    if how == "cut":
        data = data[:-100]
    elif how == "longer":
        data += bytes(10)
    elif how == "header":
        data[60] ^= 1
    elif how == "magic":
        data[0] ^= 1
    elif how == "empty":
        data = bytearray()
    elif how == "zeros":
        data[-4096:] = bytes(4096)
        data[-20_000:-4096] = bytes(20_000 - 4096)
    file.write_bytes(data)
    if how == "open to others":
        file.chmod(0o666)


@pytest.mark.parametrize("how", ["cut", "longer", "header", "magic", "empty", "zeros", "open to others"])
def test_a_damaged_file_is_made_anew(how: str, tmp_path: Path, library: Library) -> None:  # noqa: F811
    """Nothing false is taken, and what is packed instead is kept."""
    wanted = made(tmp_path, library)
    damage(opened(tmp_path, library).file, how)
    packs = opened(tmp_path, library)
    for number, (layer, found) in enumerate(zip(wanted, taken(packs), strict=True)):
        assert found is None or torch.equal(found.packed, layer.packed)
        if found is None:
            packs.add(f"layer {number}", layer)
    packs.save()
    assert None not in taken(opened(tmp_path, library))


def test_a_large_file_is_mapped(tmp_path: Path, library: Library) -> None:  # noqa: F811
    """Layers are pages of it, aligned as kernels read them, and stay whole when a newer file takes its place."""
    layers = [quantize(library, kind, torch.randn(1000, 2000 + number), None) for number, kind in enumerate(KINDS * 4)]
    packs = opened(tmp_path, library)
    for number, layer in enumerate(layers):
        packs.add(f"layer {number}", layer)
    packs.save()
    packs = opened(tmp_path, library)
    found = [packs.layer(f"layer {number}", None) for number in range(len(layers))]
    if not packs.is_mapped:
        pytest.skip("needs a kernel and a file system that map files in huge pages (Linux 6.16, ext4 or XFS)")
    made(tmp_path, library, "revision 2")
    assert not packs.file.exists()
    for layer, other in zip(layers, found, strict=True):
        assert other is not None
        assert other.packed.data_ptr() % module.ALIGNMENT == 0
        assert torch.equal(other.packed, layer.packed)
        inputs = torch.randn(3, layer.in_features)
        assert torch.equal(other(inputs), layer(inputs))


def test_a_file_of_another_key_is_not_taken(tmp_path: Path, library: Library) -> None:  # noqa: F811
    """Not even under this key's name; the newer file takes the older one's place, and another model's stays."""
    made(tmp_path, library, "revision 1")
    made(tmp_path, library, model="other")
    old, new = opened(tmp_path, library, "revision 1").file, opened(tmp_path, library, "revision 2").file
    shutil.copy(old, new)
    assert taken(opened(tmp_path, library, "revision 2")) == [None] * NUM_LAYERS
    made(tmp_path, library, "revision 2")
    assert not old.exists()
    assert None not in taken(opened(tmp_path, library, "revision 2"))
    assert None not in taken(opened(tmp_path, library, model="other"))


def test_a_folder_or_link_of_others_is_not_used(tmp_path: Path, library: Library) -> None:  # noqa: F811
    """A folder that others may enter is neither read nor written, and a link is not followed."""
    made(tmp_path, library)
    file = opened(tmp_path, library).file
    os.rename(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert taken(opened(tmp_path, library)) == [None] * NUM_LAYERS
    file.unlink()
    file.parent.chmod(0o755)
    made(tmp_path, library)
    assert not file.exists()


def test_files_that_no_load_has_used_for_long_go_away(tmp_path: Path, library: Library) -> None:  # noqa: F811
    """A load that takes a file makes it young again."""
    made(tmp_path, library, model="used")
    made(tmp_path, library, model="unused")
    files = [opened(tmp_path, library, model=model).file for model in ("used", "unused")]
    for file in files:
        os.utime(file, (0, 0))
    opened(tmp_path, library, model="used")
    made(tmp_path, library)
    assert [file.exists() for file in files] == [True, False]


def test_without_room_nothing_is_written(
    tmp_path: Path,
    library: Library,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is looked at first; what a process left that ended while it wrote goes away."""
    folder = tmp_path / "packs"
    monkeypatch.setattr(module, "DISK_SHARE", 0.0)
    made(tmp_path, library)
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    (folder / f"left{module.PART_SUFFIX}").write_bytes(b"x")
    made(tmp_path, library)
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".packs"]


def test_a_second_load_takes_what_the_first_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, layers of the same bytes, a probe against the kept reference; without KEEP_PACKED no file."""
    own = tmp_path / "cache" / "streamserve"
    (own / "native").mkdir(mode=0o700, parents=True)
    shutil.copy2(build(best_level()), own / "native")  # kernels that are compiled
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_model(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96, head_dim=16)
    first = load_tiny(folder, quantize="int4", parity_probe=True, keep_packed=True)
    (file,) = (own / "packs").glob("*.packs")
    before = file.stat().st_ino
    second = load_tiny(folder, quantize="int4", parity_probe=True, keep_packed=True)
    assert file.stat().st_ino == before
    assert (first.num_parameters, first.linears) == (second.num_parameters, second.linears)
    for layer, other in zip(first.loaded.model.linears, second.loaded.model.linears, strict=True):
        assert torch.equal(layer.packed, other.packed)
    asked = prompts(VOCAB_SIZE)
    assert Driver(first).run(asked, max_tokens=6, chunk=16) == Driver(second).run(asked, max_tokens=6, chunk=16)
    second.close()
    first.close()
    file.unlink()
    load_tiny(folder, quantize="int4", parity_probe=False, keep_packed=False).close()
    assert not file.exists()
