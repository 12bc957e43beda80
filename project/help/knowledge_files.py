"""Passages from data files: `knowledge/*.toml`, or files of your own. Called by the migration and by `help_load`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

KNOWLEDGE = Path(__file__).with_name("knowledge")
_TEXTS = ("slug", "topic", "title")
_KNOWN = {*_TEXTS, "sentences", "values", "body", "also_asked", "keywords"}


class WrongFile(ValueError):
    """A data file that cannot be read. The message names file and passage."""


def toml_files(paths: Iterable[Path]) -> list[Path]:
    """Return the TOML files among `paths` and in the folders among them. Raises WrongFile if there is none."""
    found = [file for path in paths for file in (sorted(path.glob("*.toml")) if path.is_dir() else [path])]
    if not found:
        raise WrongFile("There is no .toml file. Write it like project/help/knowledge/plans.toml.")
    return found


def read_passages(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield each passage as the fields of the model, with `topic` as a name. Raises WrongFile."""
    for path in paths:
        try:
            entries = tomllib.loads(path.read_text(encoding="utf-8")).get("passage", [])
        except (OSError, ValueError) as error:
            raise WrongFile(f"{path}: {error}") from None
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise WrongFile(f"{path}: passages begin with [[passage]].")
        for number, entry in enumerate(entries, 1):
            yield _fields(entry, f"{path}, passage {entry.get('slug', number)!r}")


def _fields(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    unknown = sorted(entry.keys() - _KNOWN)
    if unknown:
        raise WrongFile(f"{where}: {', '.join(unknown)} is not a field. Fields are: {', '.join(sorted(_KNOWN))}.")
    for name in _TEXTS:
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise WrongFile(f"{where}: {name} is missing, or no text.")
    for name in ("sentences", "also_asked"):
        lines = entry.get(name, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise WrongFile(f"{where}: {name} is a list of texts.")
    return {
        **{name: entry[name] for name in _TEXTS},
        "sentences": "\n".join(entry.get("sentences", [])),
        "values": entry.get("values", {}),
        "body": entry.get("body", ""),
        "also_asked": "\n".join(entry.get("also_asked", [])),
        "keywords": entry.get("keywords", ""),
    }


def save_passages(entries: Iterable[dict[str, Any]], topic_model: Any, passage_model: Any) -> int:
    """Create or replace the passages by slug; return how many. The models are given, for migrations have their own."""
    number = 0
    for entry in entries:
        topic, _ = topic_model.objects.get_or_create(name=entry["topic"])
        fields = {name: value for name, value in entry.items() if name not in ("slug", "topic")}
        passage = passage_model.objects.filter(slug=entry["slug"]).first() or passage_model(slug=entry["slug"])
        for name, value in {**fields, "topic": topic}.items():
            setattr(passage, name, value)
        if hasattr(passage, "sentence_list"):  # a migration's model has no checks
            passage.full_clean()
        passage.save()
        number += 1
    return number
