"""The page of a share link, `shared/{token}`: a branch of a conversation for anyone who has the address, read-only.

The address is the secret: the page is kept out of search engines, caches and referrers, and knows no visitor. Whatever
ends a link (revoked, expired, conversation deleted, SHARE_LINKS off) is the same 404.
"""

from __future__ import annotations

import re
from typing import Any

from asgiref.sync import sync_to_async
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.shortcuts import render

from streamserve.api.conversations import MessageView, no_share
from streamserve.api.exports import shared_json, sources_of, text_of
from streamserve.dialects import native
from streamserve.protocol.errors import NotFound, StreamserveError, to_body
from streamserve.web.chat_page import CONTENT_SECURITY_POLICY
from streamserve.web.site import get_site
from streamserve.web.views import non_atomic

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cache-Control": "private, no-store",
    "X-Robots-Tag": "noindex, nofollow",
    "Referrer-Policy": "no-referrer",
}


@non_atomic
async def shared_page(request: HttpRequest, token: str) -> HttpResponse:
    """Show a shared branch as a page, or with `?format=json` as JSON."""
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD"])
    shares, is_json = get_site().services.shares, request.GET.get("format") == "json"
    response: HttpResponse
    try:
        if shares is None:
            raise no_share()
        conversation, messages = await shares.open(token)
    except StreamserveError as error:
        if isinstance(error, NotFound) and not is_json:
            raise Http404(error.message) from None
        response = JsonResponse(native.error_json(to_body(error)), status=error.http_status)
    else:
        if is_json:
            response = JsonResponse(shared_json(conversation, messages))
        else:
            shown = [_shown(one) for one in messages]
            context = {"title": conversation.title, "created": conversation.created_at, "messages": shown}
            response = await sync_to_async(render)(request, "streamserve/shared_page.html", context)
    for name, value in _HEADERS.items():
        response[name] = value
    return response


shared_page.login_required = False  # type: ignore[attr-defined]  # of LoginRequiredMiddleware: the address is enough


def _shown(message: MessageView) -> dict[str, Any]:
    """Return what the template shows of a message."""
    return {
        "is_question": message.role == "user",
        "text": text_of(message),
        "sources": [{**source, "link": safe_link(source["url"])} for source in sources_of(message)],
        "attachments": [attachment.name for attachment in message.attachments],
        "is_running": message.state == "running",
        "has_failed": message.state == "failed",
    }


def safe_link(url: str) -> str:
    """Return an address that may be followed: of the web, or of this site; "" for any other."""
    return url if re.match(r"https?://|/(?![/\\])", url, re.IGNORECASE) else ""
