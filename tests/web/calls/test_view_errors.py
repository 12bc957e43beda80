"""Laws of uncaught errors in a site's own views: each has its status, as JSON for programs and a page for browsers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.handlers import exception as djangos
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path

from streamserve import acomplete, complete, run_pipeline, stream
from streamserve.models import ApiKey
from streamserve.protocol import errors
from streamserve.protocol.errors import StreamserveError
from streamserve.testing import DaphneServer
from streamserve.web import site
from streamserve.web.calls import background, view_errors

pytestmark = pytest.mark.django_db(transaction=True)

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


async def awhole(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": (await acomplete("hi", request=request, **request.GET.dict())).text})


def whole(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": complete("hi", request=request, **request.GET.dict()).text})


def pieces(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": "".join(stream("hi", request=request, **request.GET.dict()))})


async def run(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": (await run_pipeline("nothing", "hi", request=request)).text})


def raising(request: HttpRequest, name: str) -> JsonResponse:
    raise ERRORS[name]


async def araising(request: HttpRequest, name: str) -> JsonResponse:
    raise ERRORS[name]


ERRORS: dict[str, StreamserveError] = {
    name: kind(f"The message <of> {name}.")
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, StreamserveError)
}
OF_500 = ("StreamserveError", "ProducerLost")  # failures, which Django reports as any other
VIEWS = (awhole, whole, pieces, run)
urlpatterns = [
    *(path(view.__name__, view) for view in VIEWS),
    path("raising/<name>", raising),
    path("araising/<name>", araising),
]


@pytest.fixture
def own_views() -> Iterator[None]:
    with override_settings(ROOT_URLCONF=__name__):
        yield
    background.run(site.reset, "")


@pytest.mark.usefixtures("own_views")
@pytest.mark.parametrize("view", [view.__name__ for view in VIEWS])
def test_a_visitor_is_refused_in_every_form(view: str) -> None:
    """The issue's case: no 500 with a traceback, from sync and async views, under the sync test client."""
    refused = Client().get(f"/{view}")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "unauthorized"
    assert refused["WWW-Authenticate"] == "Bearer"
    assert "Accept" in refused["Vary"]


@pytest.mark.usefixtures("own_views")
def test_errors_of_a_call_have_their_status(alice: Any) -> None:
    """An unknown model, a wrong field, and a key without the scope."""
    signed_in = Client()
    signed_in.force_login(alice)
    for view in ("awhole", "whole", "pieces"):
        for query, status, code in (
            ("?model=nope", 404, "model_not_found"),
            ("?max_token=3", 400, "unknown_field"),
            ("?max_tokens=nine", 400, "invalid_type"),
        ):
            refused = signed_in.get(f"/{view}{query}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), view
            assert refused.json()["error"]["param"]
    watcher = {"authorization": f"Bearer {ApiKey.objects.make(name='watcher', scopes=['watch'])[1]}"}
    assert Client().get("/awhole", headers=watcher).json()["error"]["code"] == "insufficient_scope"
    assert Client().get("/whole", headers=watcher).status_code == 403


@pytest.mark.usefixtures("own_views")
@pytest.mark.parametrize("name", sorted(set(ERRORS) - set(OF_500)))
async def test_each_public_error_is_a_response(name: str) -> None:
    """Sync and async; JSON for a program. A browser gets the site's own page where Django has such pages."""
    error, client = ERRORS[name], AsyncClient()
    for view in ("raising", "araising"):
        told = await client.get(f"/{view}/{name}")
        assert (told.status_code, told["Content-Type"]) == (error.http_status, "application/json")
        assert told.json()["error"] == {"code": error.code, "message": error.message, "param": None}
        assert ("Retry-After" in told) == isinstance(error, errors.Refused)
        shown = await client.get(f"/{view}/{name}", headers=BROWSER)
        page = 403 if error.http_status == 401 else error.http_status
        assert shown.status_code == page
        has_page = page in (400, 403, 404)
        assert shown["Content-Type"].startswith("text/html" if has_page else "text/plain")
        if not has_page:
            assert shown.content.decode() == error.message


@pytest.mark.usefixtures("own_views")
@pytest.mark.parametrize("name", OF_500)
async def test_a_failure_stays_a_failure(name: str) -> None:
    """What no caller can help is raised in the site's tests, and reported with its traceback by Django."""
    with pytest.raises(StreamserveError):
        await AsyncClient().get(f"/araising/{name}")
    assert (await AsyncClient(raise_request_exception=False).get(f"/araising/{name}")).status_code == 500


@override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=["tests.web.calls.test_view_errors.Own"])
def test_a_sites_own_middleware_comes_first() -> None:
    """`process_exception` of the site decides; other exceptions are Django's."""
    assert Client().get("/raising/NotFound").content == b"the site's own NotFound"


class Own:
    """A middleware with an answer for every exception."""

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> Any:
        from django.http import HttpResponse

        return HttpResponse(f"the site's own {type(error).__name__}")


def test_it_leans_on_this_function_of_django() -> None:
    """Django looks `response_for_exception` up when an exception comes; ours stands there, once, before Django's."""
    assert djangos.response_for_exception.__wrapped__.__module__ == "django.core.handlers.exception"  # type: ignore[attr-defined]
    view_errors.install()
    assert not hasattr(djangos.response_for_exception.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]

    def fail(request: HttpRequest) -> Any:
        raise errors.QuotaExceeded("Wait.", retry_after=7)

    refused = djangos.convert_exception_to_response(fail)(RequestFactory().get("/"))
    assert (refused.status_code, refused["Retry-After"]) == (429, "7")
    assert async_to_sync(AsyncClient().get)("/no-such-page").status_code == 404


def test_a_real_server_answers_so() -> None:
    """daphne, without DEBUG: the refusal is no error of the site's in its log."""
    conf = {**settings.STREAMSERVE, "ANONYMOUS": False}
    with DaphneServer(settings={"ROOT_URLCONF": __name__, "STREAMSERVE": conf}) as server:
        for view in ("awhole", "whole"):
            refused = httpx.get(f"{server.url}/{view}", timeout=60, trust_env=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        page = httpx.get(f"{server.url}/awhole", headers=BROWSER, timeout=60, trust_env=False)
        assert (page.status_code, page.headers["content-type"]) == (403, "text/html; charset=utf-8")
        assert "Traceback" not in server.log()
