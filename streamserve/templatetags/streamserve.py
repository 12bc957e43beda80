"""`{% load streamserve %}{% streamserve_chat %}`: the chat element, in any page of the site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django import template
from django.core.exceptions import ImproperlyConfigured
from django.middleware.csrf import get_token

from streamserve.web.chat_page import widget_config

register = template.Library()


@register.inclusion_tag("streamserve/chat.html", takes_context=True)
def streamserve_chat(
    context: dict[str, Any],
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
    first_token_budget: float = 0,
    total_budget: float = 0,
    address: bool = False,
) -> dict[str, Any]:
    """Render the chat for this visitor.

    `system` is the system prompt of this widget, which the visitor does not see; `suggestions` a list, or a text with |
    between the questions; `name` keeps its conversation apart from other widgets' conversations; `figures` shows tokens
    and times under "How this answer was made", and the budgets, in seconds, beside what was measured. `models` are the
    models to choose from, as aliases, or as a dict of their titles by alias; `intro` is a line below the title.
    `math` typesets LaTeX. `form` is "fill" (the element around it), or "corner": a button opens it there. `address`
    puts the open conversation into the page's address, for users whose conversations the server keeps.
    """
    request = context.get("request")
    if request is None:
        hint = "Render the page with render(), and name django.template.context_processors.request in TEMPLATES."
        raise ImproperlyConfigured(f"streamserve_chat needs the request in the page's context. {hint}")
    config = widget_config(
        request,
        context.get("user") or getattr(request, "user", None),
        model=model,
        system=system,
        suggestions=suggestions,
        title=title,
        name=name,
        figures=figures,
        math=math,
        form=form,
        models=models,
        intro=intro,
        budgets={"first_token": first_token_budget, "total": total_budget},
        address=address,
    )
    return {"streamserve": config, "csrf_token": get_token(request)}
