"""The built site, as files: every page is there, whole, with its figures described and its links alive."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import PAGES

HTML = Path(__file__).parents[1] / "_build" / "html"
CHAPTERS = [
    "01_memory_wall", "02_online_softmax", "03_tiling", "04_first_kernel", "05_forward_kernel", "06_backward_pass",
    "07_numerics", "08_masks", "09_fast", "10_debugging", "11_using_it", "12_ring", "13_decoding", "14_fp8", "15_sparse",
    "16_hopper",
]  # fmt: skip


class Page(HTMLParser):
    """What the tests ask of a page: ids, links, pictures."""

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text()
        self.ids, self.links, self.unnamed = [], [], []
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        is_picture = tag == "img" or (tag == "svg" and attributes.get("role") == "img")
        if is_picture and not (attributes.get("alt") or attributes.get("aria-label")):
            self.unnamed.append(attributes)


@pytest.fixture(scope="module")
def site():
    assert (HTML / "index.html").exists(), "make book builds the site"
    return {
        path.relative_to(HTML).as_posix(): Page(path) for path in HTML.rglob("*.html") if "_static" not in path.parts
    }


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole(name, site):
    page = site[name]
    assert "Traceback (most recent call last)" not in page.text
    assert "system-message" not in page.text
    assert not re.search(r"\{(term|cite|glue[:\w]*|math)\}`", page.text), "a role that was not understood"
    assert not page.unnamed


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_shows_its_figures_and_outputs(name, site):
    page = site[f"notebooks/{name}.html"]
    assert page.text.count('class="flashattn-picture"') >= 2
    assert page.text.count('class="cell_output') >= 3
    assert "Predict" in page.text and "What is now known" in page.text


@pytest.mark.parametrize("name", PAGES)
def test_internal_links_resolve(name, site):
    for link in site[name].links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (HTML / name).parent / unquote(parts.path) if parts.path else HTML / name
        assert target.resolve().exists(), link
        relative = target.resolve().relative_to(HTML.resolve()).as_posix()
        if parts.fragment and relative in site:
            assert unquote(parts.fragment) in site[relative].ids, link
