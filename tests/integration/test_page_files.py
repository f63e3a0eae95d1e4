"""The status page's files, as text: what they bring, and what they cannot do."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from test_rest import asked

from kvferryd.api.rest.page import FILES

TEXT = {path: body.decode() for path, (body, _) in FILES.items()}
SCRIPTS = {path: text for path, text in TEXT.items() if path.endswith(".js")}
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


@pytest.fixture
def document() -> Document:
    parsed = Document()
    parsed.feed(TEXT["/"])
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


def test_every_address_in_the_files_is_one_of_them_and_relative(document: Document) -> None:
    assert {f"/{address}" for address in document.addresses} <= FILES.keys()
    imported = {f"/page/{name}" for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert imported | {"/page/page.js"} == SCRIPTS.keys(), "nothing is missing, nothing is left over"
    named = [address for text in TEXT.values() for address in re.findall(r"https?://[^\s\"'<]+", text)]
    assert set(named) == {"http://www.w3.org/2000/svg"}, "an XML name, which nobody asks for"
    assert not re.search(r"@import|url\(", TEXT["/page/page.css"])


def test_nothing_in_the_files_is_what_the_policy_refuses(document: Document) -> None:
    assert not document.attributes & {"style", "onclick", "onload", "srcdoc"}
    assert not [path for path, text in SCRIPTS.items() if MARKUP.search(text)]


def test_every_element_that_a_script_takes_by_its_id_is_there_once(document: Document) -> None:
    assert len(document.ids) == len(set(document.ids))
    taken = {name for text in SCRIPTS.values() for name in re.findall(r'\b(?:at|say)\("([^"]+)"', text)}
    assert taken <= set(document.ids)
