"""docs/reference/commands.md: every management command, from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from django.core.management import load_command_class
from django.core.management.base import BaseCommand, DjangoHelpFormatter

import streamserve
from docs.generate.text import head, linked, table

_INTRO = """
Every command of `manage.py` that streamserve adds, with its arguments. Django's own options (`--settings`,
`--verbosity`, …) are taken too. `manage.py <command> --help` shows the same.
"""
_COMMANDS = Path(streamserve.__file__).parent / "management" / "commands"


def page() -> str:
    """Return the page."""
    parts = [head("Reference: commands", _INTRO, "the parsers of streamserve/management/commands/")]
    for path in sorted(_COMMANDS.glob("streamserve_*.py")):
        command = load_command_class("streamserve", path.stem)
        parser = command.create_parser("manage.py", path.stem)
        parts.append(f"\n## {path.stem}\n\n{linked(_sentence(command.help))}\n")
        parts += _tables(parser, path.stem)
    return "".join(parts)


def _tables(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yield the table of a parser's own arguments, the positional first, then those of its subcommands."""
    django = {action.dest for action in BaseCommand().create_parser("manage.py", name)._actions}
    own = [action for action in parser._actions if action.dest not in django]
    subcommands = [action for action in own if isinstance(action, argparse._SubParsersAction)]
    arguments = sorted(
        (action for action in own if action not in subcommands), key=lambda one: bool(one.option_strings)
    )
    if arguments:
        yield f"\n{table(['argument', 'meaning'], map(_row, arguments))}"
    for action in subcommands:
        for choice in action._choices_actions:
            yield f"\n### {name} {choice.dest}\n\n{linked(_sentence(choice.help or ''))}\n"
            yield from _tables(action.choices[choice.dest], f"{name} {choice.dest}")


def _row(action: argparse.Action) -> list[str]:
    shown = ", ".join(action.option_strings)
    if action.nargs != 0:
        shown += f" {DjangoHelpFormatter('')._format_args(action, action.dest.upper())}"
    return [f"`{shown.strip()}`", linked(_sentence((action.help or "").replace("%%", "%")))]


def _sentence(text: str) -> str:
    """Return a help text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
