"""`manage.py streamserve_chat`: chat with a model in the terminal, by the site's engine or over HTTP (--url, --key).

Ctrl-C stops the answer, a second Ctrl-C ends the command. With --prompt it prints one answer, for scripts. A terminal
shows thoughts dim and names tool calls; a file or a pipe gets the answer's text only.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import ArgumentParser
from contextlib import aclosing
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from streamserve.conf import get_settings
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import StreamserveError
from streamserve.web.cli.loading_bar import LoadingBar
from streamserve.web.cli.terminal import AnswerText, Chat, LocalChat, RemoteChat


class Command(BaseCommand):
    """Reads lines, shows answers."""

    help = "Chat with a model in the terminal."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--model", help="alias of a model in MODELS; default: DEFAULT_MODEL")
        parser.add_argument("--prompt", help="ask this, print the answer, end")
        parser.add_argument("--system", help="a system message to begin with")
        parser.add_argument("--max-tokens", type=int, help="at most so many tokens an answer")
        parser.add_argument("--temperature", type=float, help="0 is greedy")
        parser.add_argument("--url", help="a running site (http://127.0.0.1:8000); without it the engine is asked")
        parser.add_argument("--key", help="API key for --url; default: the variable STREAMSERVE_KEY")

    def handle(self, *args: Any, **options: Any) -> None:
        with asyncio.Runner() as runner:
            try:
                self._talk(runner, self._chat(options), options["prompt"])
            except StreamserveError as error:
                raise CommandError(error.message) from None

    def _talk(self, runner: asyncio.Runner, chat: Chat, prompt: str | None) -> None:
        """Alternate questions and answers. `runner.run` makes Ctrl-C cancel an answer; at the prompt it ends all."""
        try:
            runner.run(self._open(chat))
            if prompt is not None:
                runner.run(self._answer(chat, prompt))
                return
            self.stderr.write("Type a question. Ctrl-C stops an answer, Ctrl-D leaves.")
            while (question := self._ask()) is not None:
                try:
                    runner.run(self._answer(chat, question))
                except KeyboardInterrupt:
                    self.stdout.write(" [stopped]")
                except StreamserveError as error:
                    self.stderr.write(error.message)
        except KeyboardInterrupt:
            self.stdout.write("")
        finally:
            runner.run(chat.aclose())

    def _chat(self, options: dict[str, Any]) -> Chat:
        messages = [{"role": "system", "content": options["system"]}] if options["system"] else []
        fields = {"max_tokens": options["max_tokens"], "temperature": options["temperature"]}
        fields = {name: value for name, value in fields.items() if value is not None}
        if options["url"]:
            return RemoteChat(
                options["url"], options["key"] or os.environ.get("STREAMSERVE_KEY"), options["model"], fields, messages
            )
        settings = get_settings()
        alias = options["model"] or settings.default_model
        if alias not in settings.models:
            raise CommandError(f"There is no model {alias!r}. MODELS has: {', '.join(settings.models)}.")
        return LocalChat(settings, alias, fields, messages)

    def _ask(self) -> str | None:
        """Read one question that is not empty; None at the end."""
        try:
            while not (line := input("\n> " if sys.stdin.isatty() else "").strip()):
                pass
        except EOFError:
            return None
        return line

    async def _answer(self, chat: Chat, question: str) -> None:
        shown = AnswerText(is_terminal=self.stdout.isatty())
        try:
            async with aclosing(chat.ask(question)) as answer:
                async for piece in answer:
                    self.stdout.write(shown.add(piece), ending="")
                    self.stdout.flush()
        finally:
            self.stdout.write(shown.end(), ending="")
        self.stdout.write("")

    async def _open(self, chat: Chat) -> None:
        """Wait for the model; show a loading bar on a terminal."""
        bar = LoadingBar(sys.stderr)
        try:
            await chat.open(bar.show if sys.stderr.isatty() else _show_nothing)
        finally:
            bar.close()


def _show_nothing(model: ModelDescription) -> None:
    return None
