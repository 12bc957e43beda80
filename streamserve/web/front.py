"""`Front`: serves streamserve's routes with the site's middleware, but without a thread for each request.

Django runs each hook of a synchronous middleware on a thread that it makes for the request, and its signals too: about
20 changes of threads and 8 ms before the response head. The hooks of Django's own middleware only read and write
headers, so here they are called on the event loop. What may block is run as Django runs it: middleware of other
packages, and the session middleware when it saves. Middleware, order, URLs, signals and responses stay the site's.

An upload is not received before its view knows the caller: Django would store all of it first.

Other addresses, and an application that is not Django's own handler, are passed on untouched. Event loop only; inside
a StreamMiddleware, whose `Receiver` learns that the client has left.

Relies on, in Django 5.2 to 6.1: `BaseHandler.adapt_method_mode`, which `load_middleware` calls with each middleware as
`convert_exception_to_response` has wrapped it (`__wrapped__`), and with each `process_view`; `ASGIHandler.handle`, and
what that calls. Under a Django that lacks any of it, `fronted` warns, and Django's own handler serves.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import Any

import django
from asgiref.sync import SyncToAsync, sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth.middleware import AuthenticationMiddleware, LoginRequiredMiddleware
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.messages.storage import default_storage
from django.contrib.sessions.middleware import SessionMiddleware
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core import signals
from django.core.exceptions import ImproperlyConfigured, RequestAborted, SuspiciousOperation
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.handlers.exception import convert_exception_to_response
from django.dispatch import Signal
from django.http import HttpResponseBadRequest, HttpResponseBase
from django.middleware.clickjacking import XFrameOptionsMiddleware
from django.middleware.common import CommonMiddleware
from django.middleware.csrf import CsrfViewMiddleware
from django.middleware.gzip import GZipMiddleware
from django.middleware.http import ConditionalGetMiddleware
from django.middleware.locale import LocaleMiddleware
from django.middleware.security import SecurityMiddleware
from django.urls import Resolver404, URLResolver, get_resolver, set_script_prefix
from django.utils.functional import SimpleLazyObject

from streamserve.api.routes import ROUTES, Route
from streamserve.asgi.receiver import RECEIVER, Receiver
from streamserve.asgi.types import App, Receive, Scope, Send
from streamserve.conf import get_settings
from streamserve.protocol.json_body import announced_bytes

logger = logging.getLogger("streamserve.asgi")

# module, class, and its undocumented attributes that are called, replaced or read here, in views.py and in access.py.
_NEEDED = (
    ("django.core.handlers.base", "BaseHandler", "load_middleware adapt_method_mode"),
    ("django.core.handlers.asgi", "ASGIHandler", "handle read_body create_request run_get_response send_response"),
    ("django.utils.deprecation", "MiddlewareMixin", "__acall__"),
    ("django.contrib.sessions.middleware", "SessionMiddleware", "process_request process_response"),
    ("django.contrib.messages.middleware", "MessageMiddleware", "process_request process_response"),
    ("django.middleware.csrf", "CsrfViewMiddleware", "process_request process_view _reject"),
    ("django.dispatch", "Signal", "_live_receivers"),
    ("django.http", "StreamingHttpResponse", "_set_streaming_content"),
    ("asgiref.sync", "SyncToAsync", "thread_sensitive_context context_to_thread_executor"),
)
# A function, and what it must call.
_CALLED: tuple[tuple[Any, str], ...] = (
    (ASGIHandler.__call__, "handle"),
    (ASGIHandler.load_middleware, "adapt_method_mode"),
    (ASGIHandler.load_middleware, "convert_exception_to_response"),
    (convert_exception_to_response, "wraps"),
)

# Exactly these classes: a subclass may do anything.
_PURE = (
    SecurityMiddleware,
    CommonMiddleware,
    AuthenticationMiddleware,
    LoginRequiredMiddleware,
    XFrameOptionsMiddleware,
    GZipMiddleware,
    ConditionalGetMiddleware,
    LocaleMiddleware,
)
_ROUTE = re.compile(f"/(?:{'|'.join(sorted({route.path.partition('/')[0] for route in ROUTES}))})(?:/|$)")


LATE_BODY = "streamserve.body"  # in a scope: the `LateBody` of an upload
_MAX_KNOWN_CHARS = 128  # of a path whose answer is kept


class Front:
    """An ASGI app in front of Django's."""

    def __init__(self, application: App) -> None:
        self._application = application
        self._handler: App = RouteHandler()  # type: ignore[assignment]  # Django's stubs want a dict as the scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope) if scope["type"] == "http" else None
        if route is None:
            await self._application(scope, receive, send)
            return
        if route.takes_file and scope["method"] == "POST" and _may_be_large(scope):
            scope = {**scope, LATE_BODY: LateBody(receive)}
        await self._handler(scope, receive, send)


def fronted(application: App) -> App:
    """Return `application` with a `Front`, if it is Django's own handler; another app may add what is not seen here."""
    inner = application.application if type(application) is ASGIStaticFilesHandler else application
    if type(inner) is not ASGIHandler:
        return application
    lacks = missing()
    if lacks:
        logger.warning(
            "streamserve does not know this Django, %s, which lacks %s. Its own handler serves: each request takes a "
            "thread. Upgrade streamserve.",
            django.get_version(),
            ", ".join(lacks),
        )
        return application
    return Front(application)


def missing() -> list[str]:
    """Return the names that streamserve relies on and this Django lacks, though it documents none of them."""
    lacks = []
    for module, name, attributes in _NEEDED:
        owner = getattr(importlib.import_module(module), name, None)
        lacks += [f"{module}.{name}.{one}" for one in attributes.split() if not hasattr(owner, one)]
    for caller, called in _CALLED:
        if called not in caller.__code__.co_names:
            lacks.append(f"{called} in {caller.__qualname__}")
    return lacks


def route_of(scope: Scope) -> Route | None:
    """Return the route whose view the site's URLs lead to. A site may have put ours below a prefix."""
    path = str(scope["path"]).removeprefix(scope.get("root_path", "").rstrip("/"))
    if not _ROUTE.search(path):
        return None
    find = _route_at if len(path) <= _MAX_KNOWN_CHARS else _route_at.__wrapped__
    return find(path, get_resolver())


@lru_cache(maxsize=1024)  # each request asks; most POST to the same few addresses
def _route_at(path: str, resolver: URLResolver) -> Route | None:
    try:
        return getattr(resolver.resolve(path).func, "route", None)
    except Resolver404:
        return None


class LateBody(io.IOBase):
    """The body of an upload, which its view reads when it knows the caller. Until then it cannot be read.

    To Django it is a file that cannot seek. A body that other routes would take too is received before the middleware
    runs, as any is.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the pieces as they arrive. When the client leaves, the request is cancelled."""
        while not self._is_whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                await asyncio.get_running_loop().create_future()
            self._is_whole = not message.get("more_body", False)
            yield message.get("body", b"")

    def read(self, size: int = -1) -> bytes:
        """Refuse a middleware that reads the body: Django names it an UnreadablePostError."""
        raise OSError("an upload is received by its view, when the caller is known")


def _may_be_large(scope: Scope) -> bool:
    """Return whether the request's body may be larger than the bodies of routes without files."""
    headers = dict(scope["headers"])
    num_bytes = announced_bytes(headers.get(b"content-length", b"").decode("latin-1"))
    if num_bytes is not None:
        try:
            return num_bytes > get_settings().limits.max_body_bytes
        except ImproperlyConfigured:  # the view raises it
            return False
    return b"transfer-encoding" in headers or scope.get("http_version") not in ("1.0", "1.1")


class RouteHandler(ASGIHandler):
    """Django's handler, with the hooks of Django's own middleware called on the event loop."""

    def adapt_method_mode(
        self,
        is_async: bool,
        method: Any,
        method_is_async: bool | None = None,
        debug: bool = False,
        name: str | None = None,
    ) -> Any:
        """Return a coroutine function that calls the hooks directly, where that cannot block."""
        middleware = getattr(method, "__wrapped__", None)
        if is_async and method_is_async and is_pure(middleware):
            return convert_exception_to_response(_inline(middleware))
        owner = getattr(method, "__self__", None)  # of a `process_view`
        if is_async and is_pure(owner):
            return _as_coroutine(method, reads_session=type(owner) is LoginRequiredMiddleware)
        return super().adapt_method_mode(is_async, method, method_is_async, debug, name)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request. Django's `handle`, but its signals take a thread only where a receiver may need it."""
        late = scope.get(LATE_BODY)
        try:
            body_file: Any = late or await self.read_body(receive)
        except RequestAborted:
            return
        try:
            set_script_prefix(get_script_prefix(scope))
            if not _is_quiet(signals.request_started):
                await signals.request_started.asend(sender=ASGIHandler, scope=scope)
            try:
                request, error = self.create_request(scope, body_file)
            except (
                SuspiciousOperation
            ):  # too many query parameters, which Django reads here where the body names a charset
                request, error = None, HttpResponseBadRequest()
            if error is not None:
                await self.send_response(error, send)
            await self._close(error or await self._respond(request, scope[RECEIVER], send))
        finally:
            body_file.close()

    async def _respond(self, request: Any, receiver: Receiver, send: Any) -> HttpResponseBase | None:
        """Send the response and return it; cancel the view, and return None, when the client leaves before.

        The view runs in the task of the request: a task of its own would cost four turns of the loop.
        """
        task, has_left = asyncio.current_task(), False
        assert task is not None

        def leave() -> None:
            nonlocal has_left
            has_left = True
            task.cancel()

        receiver.on_left(leave)
        try:
            response = await self.run_get_response(request)
            await self.send_response(response, send)
            return response
        except asyncio.CancelledError:
            if not has_left or task.uncancel():  # the server cancels the request
                raise
            return None
        finally:
            receiver.off_left(leave)

    async def _close(self, response: HttpResponseBase | None) -> None:
        """Close the response and send `request_finished`: on the request's thread, if it has a thread."""
        context = SyncToAsync.thread_sensitive_context.get(None)
        has_thread = context is not None and context in SyncToAsync.context_to_thread_executor
        if response is not None:
            setattr(response, "_handler_class", ASGIHandler)  # noqa: B010  (the sender, in no stub)
        if response is None:
            await signals.request_finished.asend(sender=ASGIHandler)
        elif has_thread or not _is_quiet(signals.request_finished):
            await sync_to_async(response.close)()
        else:
            response.close()


def is_pure(middleware: object) -> bool:
    """Return whether no hook of this middleware blocks, except where it loads or saves a session (see the wrappers)."""
    kind = type(middleware)
    if kind is CsrfViewMiddleware:
        return not django_settings.CSRF_USE_SESSIONS
    return kind in _PURE or kind in (SessionMiddleware, MessageMiddleware)


def _inline(middleware: Any) -> Callable[[Any], Any]:
    """Return `MiddlewareMixin.__acall__` without threads."""
    process_request = getattr(middleware, "process_request", None)
    process_response = getattr(middleware, "process_response", None)
    is_session = type(middleware) is SessionMiddleware

    async def call(request: Any) -> Any:
        response = None if process_request is None else process_request(request)
        response = response or await middleware.get_response(request)
        if process_response is None:
            return response
        if is_session and (request.session.modified or django_settings.SESSION_SAVE_EVERY_REQUEST):
            return await sync_to_async(process_response)(request, response)
        return process_response(request, response)

    async def call_messages(request: Any) -> Any:
        """Open the storage on its first use: it signs cookies, and no view of ours has messages."""
        opened = []

        def storage() -> Any:
            opened.append(True)
            return default_storage(request)

        request._messages = SimpleLazyObject(storage)
        response = await middleware.get_response(request)
        if not opened:
            return response
        return await sync_to_async(middleware.process_response)(request, response)

    return call_messages if type(middleware) is MessageMiddleware else call


def _as_coroutine(process_view: Callable[..., Any], *, reads_session: bool) -> Callable[..., Any]:
    async def call(request: Any, *args: Any) -> Any:
        if reads_session and request.COOKIES.get(django_settings.SESSION_COOKIE_NAME):
            return await sync_to_async(process_view)(request, *args)
        return process_view(request, *args)

    return call


def _is_quiet(signal: Signal) -> bool:
    """Return whether only Django itself receives the signal: it closes what a request's thread has opened."""
    sync_receivers, async_receivers = signal._live_receivers(ASGIHandler)
    return not async_receivers and all(one.__module__.startswith("django.") for one in sync_receivers)
