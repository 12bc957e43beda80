"""`{% load streamserve %}{% streamserve_chat %}`: the chat element, in any page of the site."""

from __future__ import annotations

from typing import Any

from django import template
from django.middleware.csrf import get_token

from streamserve.web.chat_page import chat_config

register = template.Library()


@register.inclusion_tag("streamserve/chat.html", takes_context=True)
def streamserve_chat(context: dict[str, Any]) -> dict[str, Any]:
    """Render the chat with the site's models and the visitor's CSRF token."""
    if "streamserve" in context:
        return {"streamserve": context["streamserve"], "csrf_token": context.get("csrf_token", "")}
    request = context["request"]
    user = context.get("user")
    name = user.get_username() if user is not None and user.is_authenticated else ""
    return {"streamserve": chat_config(name), "csrf_token": get_token(request)}
