"""The help pages: what they show, how the admin edits them, and how data files load them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.test import Client

from benchmarks.demo_model.knowledge import FACTS
from project.help.knowledge_files import KNOWLEDGE, read_passages, toml_files
from project.help.models import Passage, Topic
from project.help.slots import fill
from tests.support.servers.web_servers import ROOT

pytestmark = pytest.mark.usefixtures("knowledge")


def form_of(passage: Passage, **changed: str) -> dict[str, Any]:
    values = "\n".join(f"{name}: {value}" for name, value in passage.values.items())
    names = ("title", "slug", "sentences", "body", "also_asked", "keywords")
    return {**{name: getattr(passage, name) for name in names}, "topic": passage.topic_id, "values": values, **changed}


def test_the_data_files_state_the_demo_models_facts() -> None:
    """Each passage, filled, is the answer of the fact with its slug; all are in the database, and valid."""
    entries = {entry["slug"]: entry for entry in read_passages(toml_files([KNOWLEDGE]))}
    for fact in FACTS:
        entry = entries[fact.id]
        assert fill(" ".join(entry["sentences"].splitlines()), entry["values"]) == fact.answer
    about = [entry["slug"] for entry in read_passages([KNOWLEDGE / "welcome.toml"])]  # which the model does not know
    assert len(entries) == len(FACTS) + len(about) == Passage.objects.count()
    for passage in Passage.objects.all():
        passage.full_clean()


def test_a_passage_has_a_page(client: Client) -> None:
    """With its text filled, the others of its topic, and nothing of a slot; a removed one is 404."""
    page = client.get("/help/price-team/").content.decode()
    assert "The Team plan costs $15 per seat a month" in page
    assert "/help/price-solo/" in page
    assert "{" not in page
    assert client.get("/help/").status_code == 200
    Passage.objects.get(slug="price-team").delete()
    assert client.get("/help/price-team/").status_code == 404


def test_a_value_may_be_that_of_another_passage(client: Client) -> None:
    """Its page follows an edit; a reference to what is not there is refused by name, and shown as a question mark."""
    assert "Team $15" in client.get("/help/about-prices/").content.decode()
    team, prices = (Passage.objects.get(slug=slug) for slug in ("price-team", "about-prices"))
    team.values["month"] = "$17"
    team.save()
    assert "Team $17" in client.get("/help/about-prices/").content.decode()
    prices.values["team"] = "@price-team.week"
    with pytest.raises(ValidationError, match=r"no passage has the value price-team\.week"):
        prices.full_clean()
    team.delete()
    assert "Team ?" in client.get("/help/about-prices/").content.decode()


def test_what_is_edited_is_escaped_on_the_page(client: Client) -> None:
    """A value is text, never HTML."""
    team = Passage.objects.get(slug="price-team")
    team.values["month"] = "<script>alert(1)</script>"
    team.save()
    assert b"<script>alert" not in client.get("/help/price-team/").content


def test_the_admin_edits_values_as_lines(admin_client: Client) -> None:
    """`month: $17` becomes the value; a slot without a value is refused by name, and nothing is saved."""
    team = Passage.objects.get(slug="price-team")
    url = f"/admin/help/passage/{team.pk}/change/"
    assert "month: $15" in admin_client.get(url).content.decode()
    saved = admin_client.post(url, form_of(team, values="month: $17\nminimum: two seats"))
    assert saved.status_code == 302
    team.refresh_from_db()
    assert team.values == {"month": "$17", "minimum": "two seats"}
    for wrong, message in (
        ("month: $19", "The slot {minimum} has no value"),
        ("month: $19\nminimum: 2\nother: 1", "No sentence has the slot {other}"),
        ("month: $19\nminimum", "has no colon"),
        ("month: $19\nmonth: $20\nminimum: 2", "appears twice"),
    ):
        refused = admin_client.post(url, form_of(team, values=wrong))
        assert message in refused.content.decode()
    team.refresh_from_db()
    assert team.values["month"] == "$17"


def test_help_load_reads_files_of_ones_own(tmp_path: Path) -> None:
    """They are added; --only removes the others; a mistake names its file, and changes nothing."""
    file = tmp_path / "own.toml"
    file.write_text(
        '[[passage]]\nslug = "own"\ntopic = "Mine"\ntitle = "Mine?"\nsentences = ["It is {x}."]\nvalues = { x = "y" }\n'
    )
    before = Passage.objects.count()
    call_command("help_load", str(file), verbosity=0, stdout=io.StringIO())
    assert Passage.objects.get(slug="own").text == "It is y."
    assert Passage.objects.count() == before + 1
    for text, message in (
        ("[[passage]\n", "own.toml"),
        ('[[passage]]\nslug = "a"\n', "topic is missing"),
        ('[[passage]]\nslug = "a"\ntopic = "t"\ntitle = "t"\nprice = 1\n', "price is not a field"),
        ('[[passage]]\nslug = "a"\ntopic = "t"\ntitle = "t"\nsentences = ["{x}"]\n', "slot {x} has no value"),
    ):
        (tmp_path / "wrong.toml").write_text(text)
        with pytest.raises(CommandError, match=message.replace("{", r"\{").replace("own.toml", "wrong.toml")):
            call_command("help_load", str(tmp_path / "wrong.toml"))
    assert Passage.objects.count() == before + 1
    call_command("help_load", str(tmp_path / "own.toml"), "--only", stdout=io.StringIO())
    assert [(one.slug, one.topic.name) for one in Passage.objects.all()] == [("own", "Mine")]
    assert Topic.objects.count() == 1


def test_the_admins_login_names_where_the_password_is(client: Client, settings: Any) -> None:
    """A stranger comes there from the chat's header; browsers ask for an icon that the admin does not name."""
    settings.TEMPLATES = [{**engine, "DIRS": [ROOT / "templates"]} for engine in settings.TEMPLATES]
    assert "make&nbsp;run" in client.get("/admin/login/").content.decode()
    assert client.get("/favicon.ico").headers["Location"].endswith("streamserve/icon.svg")
