"""Whatever fits `/openapi.json`, and what just does not: sent to a served site by Schemathesis, as each kind of caller.

No answer is a 5xx, and none contradicts the document: its status, its type, its body. What the document does not take
is refused.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from django.contrib.auth import get_user_model
from django.test import Client
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.proofs.scale import scaled

pytestmark = pytest.mark.proof

NUM_CASES = scaled(10_000)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
REJECTED = ["400", "401", "403", "404", "405", "408", "409", "410", "413", "415", "422", "429"]
_MAX_ADDRESS_CHARS = 8_000  # what a server takes is its own: daphne closes the connection at 64 KiB
_TOKEN = "t" * 32


@pytest.fixture(scope="module")
def site(django_db_setup: None, django_db_blocker: Any) -> Iterator[DaphneServer]:
    """A site that serves every route."""
    with django_db_blocker.unblock(), DaphneServer(settings_module="tests.support.sites.openapi_site") as server:
        yield server


@pytest.fixture
def callers(transactional_db: Any) -> Mapping[str, Mapping[str, str]]:
    """The headers of each kind of caller."""
    user = get_user_model().objects.create_user("alice", password="pw")
    client = Client()
    client.force_login(user)
    session = client.cookies["sessionid"].value
    return {
        "key": {"Authorization": f"Bearer {ApiKey.objects.make(user=user)[1]}"},
        "session": {"Cookie": f"sessionid={session}; csrftoken={_TOKEN}", "X-CSRFToken": _TOKEN},
        "nobody": {},
    }


def document_of(site: DaphneServer, headers: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the document that a caller reads."""
    reply = httpx.get(f"{site.url}/openapi.json", headers=headers, trust_env=False)
    assert reply.status_code == 200
    return dict(reply.json())


def operations_of(document: Mapping[str, Any], url: str) -> list[Any]:
    """Return what Schemathesis makes of a document, without the ways to authenticate: the test has its own callers."""
    bare = {**document, "components": {**document["components"], "securitySchemes": {}}}
    for methods in bare["paths"].values():
        for one in methods.values():
            if isinstance(one, dict):
                one.pop("security", None)
    schema = schemathesis.openapi.from_dict(bare)
    schema.config.update(base_url=url)
    schema.config.checks.update(included_check_names=[one.__name__ for one in CHECKS])
    schema.config.checks.negative_data_rejection.expected_statuses = REJECTED
    return [found.ok() for found in schema.get_all_operations()]


class Things:
    """Makes what a path names, so that cases come to something that is there."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.client = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60)

    def of(self, path: str) -> dict[str, str]:
        """Return a value of each variable part of a path, as far as there can be one."""
        made: dict[str, str] = {"name": "order" if path.startswith("/pipelines") else "echo", "model": "echo"}
        if "{stream_id}" in path:
            body = {"messages": [{"role": "user", "content": "Hi"}], "store": True}
            made["stream_id"] = self.client.post("/v1/chat/completions", json=body).headers["x-stream-id"]
        if "{response_id}" in path:
            made["response_id"] = self.client.post("/v1/responses", json={"input": "Hi"}).json()["id"]
        if "{conversation_id}" in path:
            made |= self._conversation("/v1" if path.startswith("/v1") else "")
        if "{job_id}" in path:
            made["job_id"] = self.client.post("/jobs", json={"pipeline": "order", "prompt": "Hi"}).json()["job_id"]
        if "{attachment_id}" in path:
            made["attachment_id"] = self.client.post("/attachments", files={"file": ("a.txt", b"Hi")}).json()["id"]
        if "{file_id}" in path or "{batch_id}" in path:
            made |= self._batch("messages" in path)
        return made

    def _conversation(self, root: str) -> dict[str, str]:
        conversation = self.client.post(f"{root}/conversations", json={}).json()["id"]
        asked = self.client.post(
            f"/conversations/{conversation.removeprefix('conv_')}/messages", json={"content": "Hi", "max_tokens": 1}
        )
        return {"conversation_id": conversation, "message_id": asked.headers["x-message-id"]}

    def _batch(self, is_of_messages: bool) -> dict[str, str]:
        if is_of_messages:
            one = {"custom_id": "a", "params": {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}}
            return {"batch_id": self.client.post("/v1/messages/batches", json={"requests": [one]}).json()["id"]}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
        form = {"file": ("in.jsonl", json.dumps(line).encode())}
        file_id = self.client.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return {"file_id": file_id, "batch_id": self.client.post("/v1/batches", json=body).json()["id"]}


class Run:
    """Sends cases, as each kind of caller in turn, and notes what is wrong with their responses."""

    def __init__(self, url: str, callers: Mapping[str, Mapping[str, str]]) -> None:
        self.things = Things(url, callers["key"])
        self.kinds = itertools.cycle(("key", "session", "key", "session", "nobody"))
        self.callers = callers
        self.counts, self.statuses = Counter[str](), Counter[int]()
        self.failures: dict[str, str] = {}
        self.session = requests.Session()
        self.session.trust_env = False

    def close(self) -> None:
        """Close the connections."""
        self.things.client.close()
        self.session.close()

    def send(self, operation: Any, num_cases: int) -> None:
        """Send cases of an operation: half of those that fit come to what is there."""
        made = self.things.of(operation.path)

        @seed(sum(self.counts.values()))
        @settings(
            max_examples=num_cases,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases_of(operation), is_there=st.booleans())
        def one(case: Any, is_there: bool) -> None:
            if is_there and case.meta.generation.mode == GenerationMode.POSITIVE:
                case.path_parameters = {name: made.get(name, value) for name, value in case.path_parameters.items()}
                if isinstance(case.body, dict) and case.body.get("model"):
                    case.body["model"] = "search" if "embeddings" in operation.path else "echo"
            if len(str(case.query)) <= _MAX_ADDRESS_CHARS:
                self.case(operation.label, case)

        one()

    def case(self, label: str, case: Any) -> None:
        """Send a case."""
        kind = next(self.kinds)
        response = case.call(session=self.session, headers=dict(self.callers[kind]), timeout=120)
        self.counts[kind] += 1
        self.statuses[response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                shown = f"{case.as_curl_command()[:1500]}\n{str(failure)[:1200]}\n{response.text[:600]}"
                self.failures.setdefault(f"{label}: {type(failure).__name__} {response.status_code}", shown)


def test_no_case_is_a_5xx_and_none_contradicts_the_document(
    site: DaphneServer, callers: Mapping[str, Mapping[str, str]]
) -> None:
    """Of each operation as many cases: of what it takes, and of what it does not take."""
    operations = operations_of(document_of(site, callers["key"]), site.url)
    each = NUM_CASES * 6 // (5 * len(operations)) + 1  # an operation that takes little has few different cases
    with closing(Run(site.url, callers)) as run:
        for operation in operations:
            run.send(operation, each)
    num, statuses = sum(run.counts.values()), dict(sorted(run.statuses.items()))
    print(f"{num:,} cases of {len(operations)} operations: {dict(run.counts)}; {statuses}")
    assert not run.failures, "\n\n".join(f"FAIL {key}\n{said}" for key, said in run.failures.items())
    assert num >= NUM_CASES


def cases_of(operation: Any) -> st.SearchStrategy[Any]:
    """Return cases of both kinds, as far as the operation has them."""
    positive = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    try:
        negative = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        negative.validate()
    except Exception:  # nothing can be wrong of an operation that takes nothing
        return positive
    return st.one_of(positive, negative)
