"""The pages' files, as text: what they bring, and what they cannot do."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from test_rest import asked

from kvferry.proxy import fleet
from kvferryd.api.rest.page import FILES

PAGES = {"/": FILES, fleet.AT: fleet.FILES}
"""Keyed by the path of its index.html: the status page of a daemon, and the proxy's of a fleet."""
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|document\.write|setHTML|\beval\b")


class Document(HTMLParser):
    """Every element's id and every address that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            self.attributes.add(name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href"):
                self.addresses.append(value or "")


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def text(page: str) -> dict[str, str]:
    return {path: body.decode() for path, (body, _) in PAGES[page].items()}


@pytest.fixture
def scripts(text: dict[str, str]) -> dict[str, str]:
    return {path: script for path, script in text.items() if path.endswith(".js")}


@pytest.fixture
def document(page: str, text: dict[str, str]) -> Document:
    parsed = Document()
    parsed.feed(text[page])
    return parsed


@pytest.mark.parametrize("path", FILES)
def test_each_file_is_sent_with_its_type_and_may_reach_this_daemon_only(path: str) -> None:
    answer = asked(lambda client: client.get(path))
    assert (answer.status_code, answer.content) == (200, FILES[path][0])
    assert answer.headers["content-type"].partition(";")[0] == FILES[path][1]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    assert policy.pop("frame-ancestors") == policy.pop("trusted-types") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'self'"}


def test_every_address_in_the_files_is_one_of_them_and_relative(
    page: str, document: Document, text: dict[str, str], scripts: dict[str, str]
) -> None:
    assert {f"{page}{address}" for address in document.addresses} <= text.keys()
    imported = {f"{page}page/{name}" for each in scripts.values() for name in re.findall(r'from "\./([^"]+)"', each)}
    begun = {f"{page}{address}" for address in document.addresses if address.endswith(".js")}
    assert imported | begun == scripts.keys(), "nothing is missing, nothing is left over"
    named = [address for each in text.values() for address in re.findall(r"https?://[^\s\"'<]+", each)]
    assert set(named) == {"http://www.w3.org/2000/svg"}, "an XML name, which nobody asks for"
    assert not any(re.search(r"@import|url\(", each) for path, each in text.items() if path.endswith(".css"))


def test_nothing_in_the_files_is_what_the_policy_refuses(document: Document, scripts: dict[str, str]) -> None:
    assert not document.attributes & {"style", "onclick", "onload", "srcdoc"}
    assert not [path for path, script in scripts.items() if MARKUP.search(script)]


def test_every_element_that_a_script_takes_by_its_id_is_there_once(document: Document, scripts: dict[str, str]) -> None:
    assert len(document.ids) == len(set(document.ids))
    taken = {name for script in scripts.values() for name in re.findall(r'\b(?:at|say)\("([^"]+)"', script)}
    assert taken <= set(document.ids)
