"""What the tests in a browser share: finding Chromium, serving the site, pages cut off from the network.

python tests/browser.py       # finds Chromium, or installs Debian's where that is possible, or says what to do
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import axe_playwright_python
import yaml
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
SCREENSHOTS = ROOT / "_build" / "screenshots"
# axe-core, with what makes it slow on a long page replaced by what does the same: it reads every colour anew, some
# hundred thousand times the same few, and keeps the parts of each in WeakMaps, which are slow where they hold many.
AXE = (
    """(() => {
    class WeakMap {
        #name = Symbol();
        has(key) { return Object.hasOwn(key, this.#name); }
        get(key) { return this.has(key) ? key[this.#name] : undefined; }
        set(key, value) { key[this.#name] = value; return this; }
        delete(key) { return this.has(key) && delete key[this.#name]; }
    }
    """
    + (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    + """
    const color = axe.commons.color.Color.prototype, parse = color.parseString, known = new Map();
    color.parseString = function (text) {
        if (!known.has(text)) {
            parse.call(this, text);
            known.set(text, [this.r, this.g, this.b, this.alpha]);
        }
        [this.r, this.g, this.b, this.alpha] = known.get(text);
        return this;
    };
    })()"""
)
CHROMIUMS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"] + [
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
]
MODES = ("light", "dark")
# The rules of axe-core that depend on how wide the page is; all of them run on the wide page.
NARROW_RULES = ["scrollable-region-focusable", "focus-order-semantics", "target-size", "region", "link-in-text-block"]
WIDTHS = {1280: 900, 360: 740}  # px: a laptop and a phone


def toc_pages():
    """Return the pages of the table of contents, in reading order, as paths of the site."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [f"{name}.html" for name in [toc["root"], *files]]


PAGES = toc_pages() + ["search.html", "genindex.html", "404.html"]


def find_chromium():
    """Return the path of Chromium or Chrome, from the variable CHROMIUM or where it usually is, or None."""
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else CHROMIUMS
    return next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def chromium():
    """Start Chromium without a window, and stop it."""
    path = find_chromium()
    assert path, "no Chromium: run `python tests/browser.py`"
    with sync_playwright() as playwright:
        # The sandbox needs rights that a container lacks; what is opened here is the project's own. It finds no other
        # host: to cut it off through Playwright's routes would have every request wait for Python, and cache nothing.
        alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", alone])
        yield browser
        browser.close()


@contextmanager
def serve(folder):
    """Serve a folder on localhost; give its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def new_context(browser, mode, scripts):
    """Return a context for ``Visit``."""
    return browser.new_context(
        color_scheme=mode,
        java_script_enabled=scripts,
        reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"],
    )


@functools.cache
def shared_context(browser, mode, scripts):
    """Return the one context of this kind, with a blank page, so that its window stays open between visits."""
    context = new_context(browser, mode, scripts)
    context.new_page()
    return context


class Visit:
    """A page of the site in a tab of its own, cut off from all other hosts; it records requests and errors.

    Visits in one mode share a context, so that the browser reads once what all pages load; what a visit stores is gone
    with it. A `fresh` one has a context of its own, with nothing in its cache.
    """

    def __init__(self, browser, base, mode="light", width=1280, scripts=True, fresh=False):
        self.base, self.scripts, self.fresh, self.errors, self.outside = base, scripts, fresh, [], []
        self.context = new_context(browser, mode, scripts) if fresh else shared_context(browser, mode, scripts)
        self.page = self.context.new_page()
        self.page.set_viewport_size(dict(width=width, height=WIDTHS[width]))
        self.page.set_default_timeout(20_000)
        self.page.on("request", self._request)
        self.page.on("pageerror", lambda error: self.errors.append(f"page error: {error}"))
        self.page.on("console", self._console)
        self.page.on("response", self._response)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.fresh:
            self.context.close()
        else:
            self.page.evaluate("localStorage.clear()")
            self.page.close()

    def _request(self, request):
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.outside.append(request.url)

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(f"console {message.type}: {message.text}")

    def _response(self, response):
        if response.status >= 400:
            self.errors.append(f"{response.status}: {response.url}")

    def open(self, name):
        """Open a page and wait until its formulas are set."""
        self.page.goto(self.base + name, wait_until="load")
        if self.scripts:
            self.page.evaluate("window.MathJax?.startup?.promise.then(() => null)")
        return self.page

    def resize(self, width):
        self.page.set_viewport_size(dict(width=width, height=WIDTHS[width]))
        # After 300 ms the theme makes what scrolls now a stop of the keyboard.
        self.page.wait_for_timeout(400)

    def violations(self, rules=None, within="html"):
        """Return what axe-core finds, with every rule that it has by default and its experimental ones, or some."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice", "experimental"]
        before = list(self.errors)  # axe fetches style sheets by itself, some from where they are not
        only = dict(type="rule", values=rules) if rules else dict(type="tag", values=tags)
        found = self.page.evaluate(
            "([within, only]) => axe.run(within, {runOnly: only, resultTypes: ['violations']})", [within, only]
        )
        self.errors[:] = before
        return [
            f"{violation['id']}: {node['target']} {node['html'][:120]} {node['failureSummary'][:300]}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]

    def assert_clean(self):
        """No error, and no request to another host."""
        assert not self.errors
        assert not self.outside


def main():
    """Find Chromium, install it where that needs no question, or say what to do."""
    if find_chromium() is None and os.environ.get("CHROMIUM"):
        sys.exit(f"The variable CHROMIUM names no program: {os.environ['CHROMIUM']}")
    if find_chromium() is None and shutil.which("apt-get") and os.geteuid() == 0:
        print("== No browser found: installing Debian's chromium", flush=True)
        quiet = dict(stdout=subprocess.DEVNULL, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], **quiet)
    if find_chromium() is None:
        sys.exit(
            "Testing the site needs a browser: install Chromium or Google Chrome (Debian: apt-get install chromium; "
            "macOS: brew install --cask google-chrome), or set CHROMIUM to its path."
        )


if __name__ == "__main__":
    main()
