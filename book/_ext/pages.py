"""The book's Sphinx extension: pictures, citation and address on the pages, and repairs of what they inherit.

Repairs, so that no page has an error or an accessibility fault:
- sphinx-thebe adds its script twice, which is an error on every page, and this book uses none of it;
- Sphinx wraps every formula with a line break in an environment where \\tag is an error;
- the theme puts links outside every landmark; sphinxcontrib-bibtex uses a role that is deprecated and a list whose
  children are no items; docutils makes empty corners of tables header cells, and the cells below them none;
  labels differ from what is shown.
"""

import html
import itertools
import re
from pathlib import Path

import address
import pictures
import yaml
from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(address.__file__).resolve().parents[2]
GENERATED = ROOT / "_build" / "generated"
MATHJAX = "tex-chtml.js"  # of the bundles that sphinx-mathjax-offline brings, the one that the pages load
REPAIRED = 'role="region" aria-label="Book"'
# (pattern, replacement, whether each page must have it: a theme that changed is noticed)
REPAIRS = [
    (r'<div id="pst-primary-sidebar" class="', rf'<div id="pst-primary-sidebar" {REPAIRED} class="', True),
    (r'(<button class="btn search-button-field[^>]*?) aria-label="Search"', r"\1", True),
    (r'(<i class="theme-switch [^>]*?)  ?title="[^"]*"', r"\1", False),
    (r'<summary aria-label="Toggle hidden content">', r"<summary>", False),
    (r'<div role="list" class="citation-list">', r'<div class="citation-list">', False),
    (r' role="doc-biblioentry"', r"", False),
    (r'<th class="([^"]*)">(?:<p></p>)?</th>', r'<td class="\1"></td>', False),
    (r'(class="[^"]*btn-download-(?:source|notebook)-button[^"]*")', r"\1 download", False),
    # Weight: names, punctuation and blanks have the colour of plain code; shown sources bring styles of JupyterLab's.
    (r'<span class="[npw]">([^<]*)</span>', r"\1", False),
    (r"<style>pre \{ line-height.*?\.output_html.*?</style>", r"", False),
]  # fmt: skip
NOT_FOUND = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Page not found</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><base href="{base}">
<link rel="icon" href="_static/favicon.svg" type="image/svg+xml">
<style>:root{{color-scheme:light dark}}body{{font:1.1rem/1.5 system-ui,sans-serif;max-width:34rem;margin:10vh auto;
padding:0 1rem;background:Canvas;color:CanvasText}}a{{color:LinkText}}svg{{width:5rem}}</style></head>
<body><main>{icon}<h1>There is no such page</h1><p>It may have moved. <a href="index.html">The first page of
{title}</a> lists the chapters, and <a href="search.html">the search</a> looks through all of them.</p></main></body>
</html>
"""


class Cover(Directive):
    """Show the book's cover."""

    def run(self):
        return [nodes.raw("", pictures.cover()._repr_html_(), format="html")]


class Citation(Directive):
    """Show how to cite the book, as BibTeX made from CITATION.cff."""

    def run(self):
        text = citation_bibtex()
        return [nodes.literal_block(text, text, language="bibtex")]


def citation_bibtex():
    """Return CITATION.cff as a BibTeX entry."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    fields = {
        "title": "{" + cited["title"] + "}",
        "author": " and ".join("{" + author["name"] + "}" for author in cited["authors"]),
        "year": str(cited["date-released"])[:4],
        "version": cited["version"],
        "url": cited.get("url"),
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join(["@software{flashattn,", *lines, "}"])


def configure(app, config):
    """Draw the pictures, leave sphinx-thebe out, and make the buttons from the address."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    icon = GENERATED / "favicon.svg"
    icon.write_text(pictures.icon_svg())
    pictures.write_card(GENERATED / "card.png", config.html_title)
    config.html_favicon = str(icon)
    config.html_static_path.append(str(GENERATED))
    for listeners in app.events.listeners.values():
        for listener in list(listeners):
            if listener.handler.__module__ == "sphinx_thebe":
                app.disconnect(listener.id)
    app.registry.css_files = [(name, how) for name, how in app.registry.css_files if name != "sphinx-thebe.css"]

    url, options = address.read_address(), config.html_theme_options
    options.pop("repository_url", None)
    config.html_baseurl = address.site_address(url)
    if url:
        options |= {
            "repository_url": url,
            "repository_branch": "main",
            "use_repository_button": True,
            "use_issues_button": True,
        }
        options["launch_buttons"] = {"colab_url": "https://colab.research.google.com"}


def keep_tags_outside_split(app, doctree):
    """Give formulas with a \\tag and line breaks to MathJax as they are written."""
    for node in doctree.findall(nodes.math_block):
        text = node.astext()
        if r"\tag" in text and r"\\" in text and not node.get("nowrap"):
            node["nowrap"] = True
            node.children = [nodes.Text(rf"\[{text}\]")]


def name_rows(app, doctree):
    """Make the first column of a table the names of its rows where its corner is empty."""
    for table in doctree.findall(nodes.tgroup):
        corner = next(table.findall(nodes.entry), None)
        if corner is not None and table.next_node(nodes.thead) is not None and not corner.astext().strip():
            table.next_node(nodes.colspec)["stub"] = 1


def describe(doctree):
    """Return the first paragraph that says something about a page, in at most 200 characters."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        if len(text) > 60 and not re.match(r"(<small>)?(Prerequisites|Before this)", text):
            return text if len(text) <= 200 else text[:199].rsplit(" ", 1)[0] + " …"
    return ""


def add_metadata(app, pagename, templatename, context, doctree):
    """Describe a page to search engines, and give it a card for social networks."""
    site, title = app.config.html_baseurl, re.sub(r"<.*?>", "", context.get("title") or app.config.html_title)
    described = {
        "og:title": html.unescape(title),
        "og:site_name": app.config.html_title,
        "og:type": "article",
        "og:description": describe(doctree) if doctree else "",
        # Without an address for the site the picture is named relative to the page.
        "og:image": (site + "_static/card.png") if site else context["pathto"]("_static/card.png", 1),
        "og:image:width": "1200",
        "og:image:height": "630",
        "og:image:alt": pictures.ALT,
        "og:url": f"{site}{pagename}.html" if site else "",
    }
    tags = [f'<meta property="{name}" content="{html.escape(text)}"/>' for name, text in described.items() if text]
    tags += ['<meta name="twitter:card" content="summary_large_image"/>']
    if described["og:description"]:
        tags.append(f'<meta name="description" content="{html.escape(described["og:description"])}"/>')
    context["metatags"] = context.get("metatags", "") + "\n    ".join(["", *tags])


def repair(text, name):
    """Return a page's HTML repaired; raise RuntimeError if something that each page should have is not there."""
    for pattern, replacement, required in REPAIRS:
        text, count = re.subn(pattern, replacement, text, flags=re.S)
        if required and not count:
            raise RuntimeError(f"{name}: nothing matches {pattern!r}; did the theme change?")
    # A table that scrolls takes the focus, so it needs a role and a name of its own.
    numbers = itertools.count(1)
    table = r'<div class="pst-scrollable-table-container"|<div class="output text_html"(?=>\s*<table)'
    return re.sub(table, lambda match: f'{match[0]} role="region" aria-label="Table {next(numbers)}"', text)


def finish(app, exception):
    """Repair the pages that were written, add the page for addresses that do not exist, drop what nothing loads."""
    if exception or app.builder.name != "html":
        return
    out = Path(app.outdir)
    for path in out.rglob("*.html"):
        text = path.read_text()
        if "_static" not in path.parts and "bd-main" in text and REPAIRED not in text:  # left from an earlier build
            path.write_text(repair(text, path.relative_to(out)))
    base = re.sub(r"https://[^/]+", "", app.config.html_baseurl) or "./"
    icon = pictures.icon_svg().replace("<svg", '<svg aria-hidden="true"')
    (out / "404.html").write_text(NOT_FOUND.format(base=base, icon=icon, title=app.config.html_title))
    for bundle in (out / "_static" / "mathjax").glob("*.js"):
        if bundle.name != MATHJAX:
            bundle.unlink()


def setup(app):
    """Register the extension with Sphinx."""
    app.add_directive("cover", Cover)
    app.add_directive("citation", Citation)
    app.connect("config-inited", configure)
    app.connect("doctree-read", keep_tags_outside_split)
    app.connect("doctree-read", name_rows)
    app.connect("html-page-context", add_metadata)
    app.connect("build-finished", finish)
    # From a folder a page may not read another one: search lists the hits without their excerpts.
    plain_hits = "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;"
    app.add_js_file(None, body=plain_hits, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
