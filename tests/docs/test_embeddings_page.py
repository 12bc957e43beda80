"""docs/embeddings.md: its blocks run, in a site that the README's blocks have made, with a model without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.docs.doc_blocks import blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.web_servers import wait_until_ready

pytestmark = pytest.mark.proof

PAGE = "docs/embeddings.md"
MODEL = {"BAAI/bge-small-en-v1.5": "echo"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("embeddings"))
    for block in blocks_of(PAGE):
        if block.file_name == "settings.py":
            site.write(block, "mysite", MODEL)
        elif block.file_name:
            site.write(block)
    yield site
    site.run("python manage.py streamserve_engine search --stop")
    site.close()


def test_the_client_gets_vectors(site: DocSite) -> None:
    """As the page's first example asks, of a site that it has set up."""
    key = site.run("python manage.py streamserve_key create").split()[-1]
    (client,) = [block.code for block in blocks_of(PAGE) if "OpenAI(" in block.text]
    with site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        code = client.replace("http://127.0.0.1:8000", server.url).replace("sk-…", key)
        (site.project / "ask.py").write_text(code)
        assert site.run("python ask.py") == "2 64 44\n"


def test_the_search_finds_the_nearest_page(site: DocSite) -> None:
    """From a shell, where the model's process is the same."""
    code = "from shop.search import nearest; print(nearest('pause a subscription'), nearest('the Team plan'))"
    assert site.run(f'python manage.py shell -v 0 -c "{code}"').splitlines()[-1] == "pause price"


def test_the_row_of_a_batch_is_embedded(site: DocSite) -> None:
    """From file to file."""
    (row,) = [block.text for block in blocks_of(PAGE, "Batches")]
    (site.project / "in.jsonl").write_text(row)
    site.run("python manage.py streamserve_batch in.jsonl out.jsonl")
    answer = json.loads((site.project / "out.jsonl").read_text())
    assert answer["custom_id"] == "article-17"
    assert len(answer["response"]["body"]["data"][0]["embedding"]) == 64


def test_texts_and_tokens_as_the_completions_page_shows(site: DocSite) -> None:
    """docs/completions.md: there and back."""
    key = site.run("python manage.py streamserve_key create").split()[-1]
    (block,) = [block for block in blocks_of("docs/completions.md", "Tokens of a text") if block.language == "sh"]
    with site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        commands = [command.replace("http://127.0.0.1:8000", server.url) for command in block.commands]
        found, back = [json.loads(site.run(f"KEY={key}; {command} -s")) for command in commands]
    assert found["count"] == len(found["tokens"]) == len("How do I pause?") + 1  # the end of an echo engine's prompt
    assert back == {"prompt": "Hi"}
