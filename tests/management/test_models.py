"""`manage.py streamserve_models`: the models of a site, what is known of each, and the types that run or do not."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test.utils import override_settings

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.model.load.source import total_memory
from streamserve.engine.model.load.support import PROVEN, REFUSED
from tests.engine.model.parity.test_variants import TYPES
from tests.support.models.large import large_model
from tests.support.models.tiny_models import CONFIGS
from tests.support.servers.upstreams import Upstream, says

HELPDESK = Path(__file__).resolve().parents[2] / "project" / "demo_model" / "helpdesk"


def run(*args: str) -> tuple[str, int]:
    """Return what the command prints, and its exit status."""
    out = io.StringIO()
    try:
        call_command("streamserve_models", *args, stdout=out, stderr=io.StringIO())
    except SystemExit as end:
        return out.getvalue(), int(end.code or 0)
    return out.getvalue(), 0


def rows(*args: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(run(*args, "--json")[0])}


@pytest.fixture
def upstream_url() -> Iterator[str]:
    """The base of a server elsewhere, on a loop of its own: the command has another one."""
    loop, upstream = asyncio.new_event_loop(), Upstream(says())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(upstream.start(), loop).result(10)
    yield upstream.url
    asyncio.run_coroutine_threadsafe(upstream.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def folder_of(tmp_path: Path, **config: Any) -> str:
    """Return a new model folder with this config.json."""
    folder = tmp_path / str(config["model_type"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return str(folder)


def test_a_model_larger_than_the_machine_is_refused(tmp_path: Path) -> None:
    """With the load's own words; one that QUANTIZE makes small enough is not."""
    folder = large_model(tmp_path / "large", 2 * total_memory())
    small = large_model(tmp_path / "small", int(1.5 * total_memory()))
    models = {
        "large": {"PATH": str(folder), "DEVICE": "cpu"},
        "rounded": {"PATH": str(small), "DEVICE": "cpu", "QUANTIZE": "int4"},
    }
    with override_settings(STREAMSERVE={"MODELS": models, "STATE_DIR": str(tmp_path / "state")}):
        found = rows()
    assert (found["large"]["support"], found["rounded"]["support"]) == ("refused", "supported")
    assert "take a smaller model" in found["large"]["reason"]


def test_the_models_of_a_site(tmp_path: Path, upstream_url: str) -> None:
    """Each has its type, whether it runs here, and its state; a refusal has the load's own words, and status 1."""
    models = {
        "desk": {"PATH": str(HELPDESK)},
        "demo": {"PATH": "echo"},
        "wrong": {"PATH": folder_of(tmp_path, model_type="jamba")},
        "later": {"PATH": "some-org/never-downloaded"},
        "big": {"URL": upstream_url, "REMOTE_MODEL": "m"},
        "gone": {"URL": "http://127.0.0.1:9/v1"},
        "both": {
            "REMOTE_MODEL": "m",
            "UPSTREAMS": [{"URL": upstream_url, "NAME": "here"}, {"URL": "http://127.0.0.1:9/v1"}],
        },
    }
    with override_settings(STREAMSERVE={"MODELS": models, "STATE_DIR": str(tmp_path / "state")}):
        found = rows()
        text, status = run()
    assert status == 1
    assert {name: (row["model_type"], row["support"], row["state"]) for name, row in found.items()} == {
        "desk": ("llama", "supported", "not running"),
        "demo": ("", "without weights", "not running"),
        "wrong": ("jamba", "refused", "not running"),
        "later": ("", "not here", "not running"),
        "big": ("vllm", "elsewhere", "ready"),
        "gone": ("", "elsewhere", "failed"),
        "both": ("vllm", "elsewhere", "ready"),
    }
    here, gone = found["both"]["upstreams"]
    assert here == f"here at {upstream_url}: vllm, weight 1, ready"
    assert gone.startswith("127.0.0.1:9 at http://127.0.0.1:9/v1: weight 1, failed (cannot connect")
    assert "recurrent state" in found["wrong"]["reason"]
    assert "cannot connect" in found["gone"]["reason"]
    assert found["desk"]["traits"] == ["context of 2,048", "tied head"]
    assert found["desk"]["template"] == [
        "roles system, developer, user, assistant, tool, function (as tool)",
        "tool calls, arguments as object",
        "no tools",
        "reads enable_thinking",
    ]
    assert [name for name in found if found[name]["template"]] == ["desk"]
    assert "chat template: roles system, developer, user" in text
    assert "recurrent state" in text


@pytest.mark.parametrize(
    ("config", "support", "said"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, "supported", "window of 512"),
        ({"model_type": "gemma2", "sliding_window": 64}, "supported", "softcap"),
        ({"model_type": "gpt_oss"}, "supported", "attention sinks"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            "supported",
            "rope yarn",
        ),
        ({"model_type": "olmoe"}, "tried at load", "context of"),
        ({"model_type": "bert"}, "refused", "an encoder"),
        ({"model_type": "t5"}, "refused", "encoder-decoder"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}, "refused", "quantised by hqq"),
        ({"model_type": "novel_thing"}, "refused", "transformers cannot read"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_a_folder(tmp_path: Path, config: dict[str, Any], support: str, said: str) -> None:
    """A model need not be in MODELS; its kind of attention, or the reason against it, is named."""
    folder = folder_of(tmp_path, **config)
    row = rows(folder)[folder]
    assert (row["support"], row["model_type"]) == (support, config["model_type"])
    assert said in " ".join([*row["traits"], row["reason"]])
    assert run(folder)[1] == (support == "refused")


def test_weights_in_another_format_are_refused(tmp_path: Path) -> None:
    """Pickles are not read; the message has the way out."""
    folder = Path(folder_of(tmp_path, model_type="llama"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in rows(str(folder))[str(folder)]["reason"]


def test_what_is_called_supported_is_tested() -> None:
    """The list of supported types is that of the parity tests, and none of it is refused."""
    assert {*CONFIGS, *TYPES} == PROVEN
    assert not PROVEN & REFUSED.keys()


def test_the_types() -> None:
    """Each refused type stands with its reason."""
    text, status = run("--types")
    found = json.loads(run("--types", "--json")[0])
    assert status == 0
    assert found["supported"] == sorted(PROVEN)
    assert sorted(name for names in found["refused"].values() for name in names) == sorted(REFUSED)
    assert all(name in text for name in (*PROVEN, *REFUSED))


def test_embedding_models_are_listed(tmp_path: Path) -> None:
    """Beside the others, as what they are."""
    conf = {
        "MODELS": {"demo": {"PATH": "echo"}},
        "EMBEDDING_MODELS": {"search": {"PATH": "org/name"}, "words": {"PATH": "echo"}},
        "CLIENT": "process",
        "STATE_DIR": tmp_path,
        "ENGINE_PROCESS": {"RUNTIME_DIR": str(tmp_path / "run")},
    }
    with override_settings(STREAMSERVE=conf):
        found = rows()
    assert [(one["name"], one["support"], one["state"]) for one in found.values()] == [
        ("demo", "without weights", "not running"),
        ("search", "embeddings", "not running"),
        ("words", "without weights", "not running"),
    ]


def test_a_draft_model_is_named_with_its_memory(tmp_path: Path) -> None:
    """Beside the model that it drafts for; a model that is not here is named so."""
    models = {
        "desk": {"PATH": str(HELPDESK), "DRAFT": str(HELPDESK)},
        "other": {"PATH": str(HELPDESK), "DRAFT": "some-org/never-downloaded"},
    }
    with override_settings(STREAMSERVE={"MODELS": models, "STATE_DIR": str(tmp_path / "state")}):
        found = rows()
    assert f"draft model {HELPDESK}: supported, 100% more KV memory in the model's dtype" in found["desk"]["traits"]
    assert any("never-downloaded: not here" in trait for trait in found["other"]["traits"])
