"""`Services`: what routes are given, by the names of their endpoints' parameters (SERVICES in api/routes.py).

A value: it opens and closes nothing, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from streamserve.api.answers import Answers
from streamserve.api.mcp import McpEndpoint
from streamserve.api.openai.responses import LocalResponses
from streamserve.api.ops import Ops
from streamserve.api.routes import SERVICES
from streamserve.conf import SiteConfig
from streamserve.rows.completions import CompletionRows
from streamserve.rows.conversation_store import ConversationRows
from streamserve.rows.responses import ResponseRows
from streamserve.rows.shares import ShareRows
from streamserve.rows.threads import ThreadRows
from streamserve.rows.usage import UsageRows
from streamserve.web.audit import WatchAudit
from streamserve.web.moderation import SiteModerator
from streamserve.work.attachments import Attachments
from streamserve.work.batches import Batches
from streamserve.work.files import Files
from streamserve.work.jobs import Jobs


def served_by(settings: SiteConfig) -> frozenset[str]:
    """Return the names of the services that a site of these settings has."""
    asked = {
        "mcp_endpoint": settings.mcp_endpoint,
        "moderator": bool(settings.moderation),
        "conversations": settings.conversations,
        "shares": settings.conversations and settings.share_links,
        "attachments": settings.conversations,
        "usage": settings.usage,
    }
    return frozenset(name for name in SERVICES if asked.get(name, True))


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services of one site. None: it has none of these, and the routes that need it answer so."""

    answers: Answers
    ops: Ops
    jobs: Jobs
    files: Files
    batches: Batches
    threads: ThreadRows
    responses: ResponseRows | LocalResponses
    watches: WatchAudit
    chats: CompletionRows | None
    conversations: ConversationRows | None
    shares: ShareRows | None
    attachments: Attachments | None
    moderator: SiteModerator | None
    mcp_endpoint: McpEndpoint | None
    usage: UsageRows | None

    @cached_property
    def by_name(self) -> Mapping[str, object]:
        """Those that the site has."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: service for name, service in found.items() if service is not None}
