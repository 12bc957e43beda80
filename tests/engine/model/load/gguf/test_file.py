"""Reading a GGUF header: what is in the file, and what is refused before anything is read of its weights."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamserve.engine.model.load.errors import ModelLoadError, UnsupportedModel
from streamserve.engine.model.load.gguf.config import config_of
from streamserve.engine.model.load.gguf.file import BrokenGGUF, GGUFFile
from tests.support.models.gguf_models import write_gguf

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def written(path: Path, **metadata: Any) -> Path:
    """Write a file with the metadata and one small tensor."""
    writer = gguf.GGUFWriter(str(path), metadata.pop("architecture", "llama"))
    for name, value in metadata.items():
        writer.add_uint32(name.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", gguf.np.zeros((4, 32), dtype="float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_places_are_those_of_the_reference(path: Path) -> None:
    """Entries, lists of strings, shapes, types and places agree with the `gguf` package's reader."""
    file, wanted = GGUFFile(path), gguf.GGUFReader(str(path))
    assert file.architecture == "llama"
    assert file.get("block_count") == 2
    assert file.strings("tokenizer.ggml.tokens") == wanted.get_field("tokenizer.ggml.tokens").contents()
    assert file.metadata["tokenizer.ggml.token_type"] == wanted.get_field("tokenizer.ggml.token_type").contents()
    assert {name: (place.shape, place.begin, place.type.name) for name, place in file.tensors.items()} == {
        tensor.name: (tuple(reversed(tensor.shape.tolist())), tensor.data_offset, tensor.tensor_type.name)
        for tensor in wanted.tensors
    }


def test_a_file_that_is_cut_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    """A prefix of a file, of whatever length, is refused by the file's name, and nothing else is raised."""
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    seed = random.randrange(1 << 30)
    lengths = random.Random(seed).sample(range(len(data) - 64), 60)
    for length in [*range(40), *lengths]:
        cut.write_bytes(data[:length])
        with pytest.raises(BrokenGGUF, match=r"cut\.gguf cannot be read .*Copy or download it again"):
            GGUFFile(cut)


def test_a_file_of_random_bytes_is_refused_or_read(path: Path, tmp_path: Path) -> None:
    """Bytes changed anywhere in the header give an error of ours, or another file; nothing else."""
    data, changed = path.read_bytes(), tmp_path / "changed.gguf"
    header_len = len(GGUFFile(path).header_bytes)
    generator = random.Random(20_260)
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(3):
            bad[generator.randrange(header_len)] = generator.randrange(256)
        changed.write_bytes(bad)
        with suppress(ModelLoadError):
            config_of(GGUFFile(changed))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    """Other files, other versions and big-endian files are refused by what is wrong with them."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BrokenGGUF, match="begins with b'PK"):
        GGUFFile(file)
    file.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(100))
    with pytest.raises(ModelLoadError, match="its version is 1"):
        GGUFFile(file)
    file.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(ModelLoadError, match="big-endian"):
        GGUFFile(file)


def test_an_unsupported_type_names_tensor_and_type(path: Path, tmp_path: Path) -> None:
    """The message names the file, the tensor, its type and a type to take instead."""
    data = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    begin = data.index(name) + len(name) + 4 + 8  # a dimension's count, and one dimension
    data[begin : begin + 4] = struct.pack("<I", 10)
    bad = tmp_path / "q2.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"q2\.gguf is not read: output_norm\.weight is stored as Q2_K.*Q4_K_M"):
        GGUFFile(bad)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    """A file of a split model names the command that joins the parts."""
    with pytest.raises(ModelLoadError, match=r"part 2 of 3 of a model.*llama-gguf-split --merge"):
        GGUFFile(written(tmp_path / "part.gguf", split__count=3, split__no=1))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    """An architecture that is not in the table is refused by its name, with the ways out."""
    with pytest.raises(UnsupportedModel, match=r"architecture 'mamba'; known are llama, .*llama-server"):
        config_of(GGUFFile(written(tmp_path / "m.gguf", architecture="mamba")))


def test_a_file_without_its_sizes_is_refused(tmp_path: Path) -> None:
    """An entry of the metadata that a config needs is asked for by name."""
    with pytest.raises(ModelLoadError, match=r"has no llama\.block_count in its metadata"):
        config_of(GGUFFile(written(tmp_path / "m.gguf")))
