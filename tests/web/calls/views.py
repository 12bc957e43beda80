"""Views of a site that uses the Python API, async and sync, for test_answers.py."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import include, path

from streamserve import acomplete, complete, stream

ASK = {"question": "tell me", "max_tokens": 12, "seed": 7}


def whole(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": complete(**ASK, request=request).text})


async def awhole(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": (await acomplete(**ASK, request=request)).text})


def pieces(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"text": "".join(stream(**ASK, request=request))})


def streamed(request: HttpRequest) -> HttpResponseBase:
    return stream(**ASK, request=request).response()


async def astreamed(request: HttpRequest) -> HttpResponseBase:
    return await stream(**ASK, request=request).aresponse("text")


def started(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"url": stream(**ASK, request=request).start().url})


async def astarted(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"url": (await stream(**ASK, request=request).astart()).url})


async def twice(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"urls": [(await stream(**ASK, request=request).astart()).url for _ in range(2)]})


VIEWS = (whole, awhole, pieces, streamed, astreamed, started, astarted, twice)
urlpatterns = [path("", include("streamserve.urls")), *(path(view.__name__, view) for view in VIEWS)]
