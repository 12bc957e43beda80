"""The chat page with its strict Content-Security-Policy, and what the chat element of any page is given.

That is addresses, model, texts, and whether the visitor may ask. Templates show it (streamserve/chat.html); the scripts
read it from `data-*` attributes. It does not depend on where the site's URLs are included: every address is made by
`reverse`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render, resolve_url
from django.urls import Resolver404, get_script_prefix, resolve, reverse
from django.utils.translation import gettext, gettext_noop

from streamserve.clients.pipeline.client import PIPELINES
from streamserve.conf import SiteConfig, get_settings
from streamserve.conf_reader import nearest
from streamserve.protocol.limits import Limits
from streamserve.web.auth import give_cookie, visitor
from streamserve.web.caller_rules import hidden_on_page
from streamserve.web.sealed import seal
from streamserve.web.site import start_loading
from streamserve.web.views import non_atomic
from streamserve.web.websocket import socket_path
from streamserve.work.file_text import kinds

FORMS = ("fill", "corner")  # fill the element around it, or float in the page's corner
_STORAGE = "streamserve.chat"  # begins every key of the browser's storage that is ours
_SOURCE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")  # what a conversation may say it was begun by


def widget_config(
    request: HttpRequest,
    user: Any,
    *,
    model: str = "",
    system: str = "",
    suggestions: str | Iterable[str] = (),
    title: str = "",
    name: str = "",
    figures: bool = False,
    math: bool = False,
    form: str = "fill",
    models: str | Iterable[str] | Mapping[str, str] = (),
    intro: str = "",
    budgets: Mapping[str, float] | None = None,
    address: bool = False,
) -> dict[str, Any]:
    """Return the variable `streamserve` of chat.html. `user` is the visitor, or None.

    `name` keeps the conversations of different widgets apart; without a name, another model or title does.
    `models` are the models a visitor may choose from, or their titles by alias; the first is chosen at first. Those
    that this visitor may not use are left out. `intro` is a line below the title. `budgets` has `first_token` and
    `total`, in seconds, shown beside what was measured. `math` typesets LaTeX. `form` is one of `FORMS`. `address`: the
    open conversation is in the page's address, where the server keeps conversations (CONVERSATIONS, for users).
    """
    if form not in FORMS:
        raise ImproperlyConfigured(f"A chat has the form {form!r}. The forms are {', '.join(FORMS)}.")
    settings = get_settings()
    titles = models if isinstance(models, Mapping) else {}
    offered = [model] if model else _listed(models)
    for alias in offered:
        _check_model(alias, settings)
    budgets = budgets or {}
    username = user.get_username() if user is not None and user.is_authenticated else ""
    own_name = name or _default_name(model, title)
    hidden = hidden_on_page(settings, user)
    shown = [alias for alias in offered or settings.models if alias not in hidden]
    default = settings.default_model if settings.default_model in shown and not offered else (*shown, "")[0]
    return {
        "streams_url": reverse("streamserve:streams"),
        "ready_url": reverse("streamserve:readyz"),
        "live_url": reverse("streamserve:livez"),
        "websocket_url": get_script_prefix() + socket_path().removeprefix("/"),
        "models": {alias: titles.get(alias) or _title(alias, settings) for alias in shown},
        "pipelines": json.dumps([alias for alias in shown if alias in PIPELINES]),  # which continue no answer
        "default_model": default,
        "first_token_budget": json.dumps(budgets.get("first_token", 0)),
        "total_budget": json.dumps(budgets.get("total", 0)),
        "request": json.dumps({"sealed_system": seal(system)} if system else {}),
        "suggestions": _listed(suggestions),
        "intro": intro.strip(),
        "title": title.strip(),  # text, also where a template has it as a literal, which Django takes for HTML
        "figures": figures,
        "math": math,
        "timings": settings.reader_timings,
        "form": form,
        "words": json.dumps(translations(), ensure_ascii=False),
        "signed_in_as": username,
        "storage_key": f"{_STORAGE}/{quote(username, safe='')}/{quote(own_name, safe='')}",
        "conversations_url": reverse("streamserve:conversations") if username and settings.conversations else "",
        "can_share": settings.share_links,
        "attachments": json.dumps(_attachments(settings.limits) if username and settings.conversations else {}),
        "source": own_name if _SOURCE.fullmatch(own_name) else _digest(own_name),
        "address": address,
        "needs_sign_in": not (shown and (username or settings.anonymous)),
        "login_url": _login_url(request),
        "keepalive_seconds": settings.streams.keepalive_seconds,
        "csrf_cookie": django_settings.CSRF_COOKIE_NAME,
    }


def _check_model(model: str, settings: SiteConfig) -> None:
    """Raise for a model or pipeline that the site does not serve: its page would refuse every question."""
    if model and model not in settings.models and model not in PIPELINES:
        hint = nearest(model, settings.models) or f"It has {', '.join(settings.models)}."
        raise ImproperlyConfigured(f'A chat names the model {model!r}, which is not in STREAMSERVE["MODELS"]. {hint}')


def _attachments(limits: Limits) -> dict[str, Any]:
    """Return what the page's script knows of files that are attached."""
    return {
        "url": reverse("streamserve:attachments"),
        "accept": ",".join(kinds()),
        "maxFiles": limits.max_attachments,
        "maxBytes": limits.max_attachment_bytes,
    }


def _title(alias: str, settings: SiteConfig) -> str:
    """Return what people are shown of a model or pipeline."""
    if alias in settings.models:
        return settings.models[alias].title or alias
    return str(PIPELINES[alias].title)


def _listed(given: str | Iterable[str]) -> list[str]:
    """Return the texts; in a template they are one string, with | between them."""
    each = given.split("|") if isinstance(given, str) else given
    return [text for text in (str(one).strip() for one in each) if text]


def _default_name(model: str, title: str) -> str:
    return _digest(json.dumps([model, title])) if model or title else "chat"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _login_url(request: HttpRequest) -> str:
    """Return the address of the site's login that leads back to this page; "" if there is none."""
    url = resolve_url(django_settings.LOGIN_URL)
    parts = urlsplit(url)
    if not parts.netloc:
        try:
            resolve("/" + parts.path.removeprefix(get_script_prefix()))
        except Resolver404:
            return ""
    query: Mapping[str, str] = {REDIRECT_FIELD_NAME: request.get_full_path()}
    return f"{url}{'&' if parts.query else '?'}{urlencode(query)}"


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@non_atomic
async def chat_page(request: HttpRequest, template_name: str = "streamserve/chat_page.html") -> HttpResponse:
    """Show the chat page. The site may require a login for it; the streams it starts are checked by themselves."""
    return await render_chat(request, template_name)


async def render_chat(request: HttpRequest, template_name: str, *, is_open: bool = False) -> HttpResponse:
    """Return the page. `is_open`: this visitor may ask without a login, as all may where ANONYMOUS is on."""
    if hasattr(request, "scope"):  # a WSGI process beside the ASGI server loads no model
        start_loading()
    context = await chat_context(request)
    if is_open:
        context["streamserve"] |= {"is_open": True, "needs_sign_in": False}
    response = await sync_to_async(render)(request, template_name, context)
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    response["Cache-Control"] = "private, no-store"
    if is_open or get_settings().anonymous:
        give_cookie(response, visitor({"cookie": request.headers.get("Cookie", "")}))
    return response


async def chat_context(request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the chat."""
    user = await request.auser() if hasattr(request, "auser") else None
    return {"streamserve": await sync_to_async(widget_config)(request, user, address=True)}


# The texts of the page's scripts, for translation. A test compares them with the scripts (static/streamserve/*.js),
# which are in English; the page brings what differs in its language. Texts of the templates are marked there.
# `manage.py makemessages` finds both.
WORDS = (
    gettext_noop("A question brings {count} files at most."),
    gettext_noop("Allow"),
    gettext_noop("Allow {name}?"),
    gettext_noop("Answer"),
    gettext_noop("Answer complete"),
    gettext_noop("Connection lost. Trying again in {seconds} s."),
    gettext_noop("Connection lost. Trying again…"),
    gettext_noop("Copied"),
    gettext_noop("Copy"),
    gettext_noop("Ended at the length limit"),
    gettext_noop("Ended by a filter"),
    gettext_noop("Ended, because it had no reader"),
    gettext_noop("Files of this kind cannot be attached: {kinds} can."),
    gettext_noop("Found"),
    gettext_noop("From sending the question to the first words on this screen, and as the server measured it"),
    gettext_noop("From the question's arrival at the server to the end"),
    gettext_noop("Generating"),
    gettext_noop("Image: {text}"),
    gettext_noop("In the queue"),
    gettext_noop("In the queue, place {place}"),
    gettext_noop("Last 30 days"),
    gettext_noop("Last 7 days"),
    gettext_noop("New chat"),
    gettext_noop("New chat. The last one can be brought back."),
    gettext_noop("Nothing has “{query}” in it."),
    gettext_noop("Of {count} prompt tokens, taken from the prefix cache"),
    gettext_noop("Open the chat"),
    gettext_noop("Options of “{title}”"),
    gettext_noop("Pin"),
    gettext_noop("Pinned"),
    gettext_noop("Press Ctrl+C"),
    gettext_noop("Reading"),
    gettext_noop("Reading, {percent} %"),
    gettext_noop("Refuse"),
    gettext_noop("Remove {name}"),
    gettext_noop("Show less"),
    gettext_noop("Show more"),
    gettext_noop("Something on this page went wrong."),
    gettext_noop("Source {number}: {title}"),
    gettext_noop("Speed after the first token"),
    gettext_noop("Step {step}"),
    gettext_noop("Step {step} of {of}"),
    gettext_noop("Stopped"),
    gettext_noop("The answer could not be finished."),
    gettext_noop("The answer failed"),
    gettext_noop("The answer took too long and was ended."),
    gettext_noop("The budget of this chat"),
    gettext_noop("The file is empty."),
    gettext_noop("The file is over the limit of {size}."),
    gettext_noop("The last chat is back."),
    gettext_noop("The link does not work any more."),
    gettext_noop("The link is copied. Whoever has it reads this conversation as it is now."),
    gettext_noop("The model cannot answer."),
    gettext_noop("The model has stopped working. The site's owner can see why in the log."),
    gettext_noop("The model is about to be restarted. New answers wait until it is back."),
    gettext_noop("The model is busy."),
    gettext_noop("The model is loading"),
    gettext_noop("The model is paused. Answers go on when it is resumed."),
    gettext_noop("The page was left before this answer began."),
    gettext_noop("The rest of this answer is no longer kept."),
    gettext_noop("The server answered {status}."),
    gettext_noop("The server could not be reached."),
    gettext_noop("The server could not be reached. Your question is still here."),
    gettext_noop("The server does not answer. Trying again…"),
    gettext_noop("The server is back."),
    gettext_noop("Thinking…"),
    gettext_noop("This answer is no longer kept."),
    gettext_noop("This conversation could not be loaded."),
    gettext_noop("This conversation has grown too long for the model. Start a new chat to go on."),
    gettext_noop("This conversation is not there any more."),
    gettext_noop("This question is too long for the model. Shorten it and ask again."),
    gettext_noop("Thought"),
    gettext_noop("Thought for {seconds} s"),
    gettext_noop("Title"),
    gettext_noop("Today"),
    gettext_noop("Tokens of this answer"),
    gettext_noop("Tool call"),
    gettext_noop("Tool result"),
    gettext_noop("Trying again in {seconds} s"),
    gettext_noop("Unpin"),
    gettext_noop("Version {number} of {of}"),
    gettext_noop("Wait until your files are here."),
    gettext_noop("Waiting for the model"),
    gettext_noop("Whoever has this link reads this conversation as it is now: {url}"),
    gettext_noop("Why, if you like"),
    gettext_noop("Yesterday"),
    gettext_noop("You are offline."),
    gettext_noop("You asked"),
    gettext_noop("You have reached the limit of answers at a time."),
    gettext_noop("Your answer is needed: {question}"),
    gettext_noop("Your conversations will be here."),
    gettext_noop("Your rating could not be stored. Try again."),
    gettext_noop("Your rating was stored. Thank you."),
    gettext_noop("Your session has ended, or you may not ask this model. Reload the page and try again."),
    gettext_noop("Your session has ended. Reload the page and sign in again."),
    gettext_noop("code"),
    gettext_noop("first token {times}"),
    gettext_noop("is being answered"),
    gettext_noop("the first {percent} % were read"),
    gettext_noop("{count} cached"),
    gettext_noop("{count} token"),
    gettext_noop("{count} tokens"),
    gettext_noop("{loaded} of {total} MB"),
    gettext_noop("{name} is attached."),
    gettext_noop("{name} was removed."),
    gettext_noop("{percent} %"),
    gettext_noop("{rate} tok/s"),
    gettext_noop("{time} here"),
    gettext_noop("{time} in all"),
    gettext_noop("{time} server"),
    gettext_noop("“{title}” is deleted."),
)


def translations() -> dict[str, str]:
    """Return the texts that differ from English in the active language."""
    translated = {text: gettext(text) for text in WORDS}
    return {text: other for text, other in translated.items() if other != text}
