"""The address of the published repository: one place holds it, everything that shows it agrees."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build" / "html"
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import address  # noqa: E402

MADE_UP = "https://github.com/Some-Owner/some.book"
SITE = "https://some-owner.github.io/some.book/"
FILES = ["_config.yml", "README.md", "CITATION.cff", "pyproject.toml"]


@pytest.fixture
def copy(tmp_path):
    """Return a copy of everything that an address changes."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    return tmp_path


def contents(root):
    paths = [root / name for name in FILES] + sorted((root / "notebooks").glob("*.ipynb"))
    return {path.name: path.read_text() for path in paths}


def colab_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.id == address.COLAB_ID]


def test_every_place_agrees_with_the_address():
    """What the files say, and which buttons the built site shows."""
    url = address.read_address()
    for name in FILES[1:]:
        text = (ROOT / name).read_text()
        assert text == address.with_address(text, url, name), "run make address"
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert [cell.source for cell in colab_cells(path)] == ([address.COLAB_CELL.format(url=url)] if url else [])
    for path in (HTML / "notebooks").glob("*.html"):
        text = path.read_text()
        for button in ("btn-source-repository-button", "btn-source-issues-button", "colab.research.google.com"):
            assert (button in text) == bool(url), button


def test_set_and_taken_out_again(copy):
    before = contents(copy)
    address.set_address(MADE_UP + "/", copy)
    assert address.read_address(copy) == MADE_UP
    during = contents(copy)
    for name, text in during.items():
        assert MADE_UP in text, name
        assert name.endswith((".ipynb", ".yml")) or SITE in text, name
    for path in (copy / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        assert first.id == address.COLAB_ID and not first.outputs
    address.set_address(MADE_UP, copy)
    assert contents(copy) == during, "the same address twice changes nothing"
    address.set_address("", copy)
    assert contents(copy) == before


@pytest.mark.parametrize(
    "url", ["github.com/a/b", "https://example.org/a/b", "https://github.com/a", "https://github.com/a/b/c"]
)
def test_other_addresses_are_refused(url, copy):
    before = contents(copy)
    with pytest.raises(
        ValueError, match=re.escape(f"URL must be https://github.com/owner/name, or empty, got {url!r}")
    ):
        address.set_address(url, copy)
    assert contents(copy) == before


def test_site_of_an_owner_has_no_folder():
    assert address.site_address("https://github.com/Me/me.github.io") == "https://me.github.io/"


@pytest.mark.parametrize("on_colab", [True, False])
def test_colab_cell_installs_on_colab_and_nowhere_else(on_colab):
    """Run the cell in IPython, with %pip replaced by one that notes what it is asked."""
    code = f"""
import sys, types
from IPython.core.interactiveshell import InteractiveShell
shell, asked = InteractiveShell.instance(), []
shell.register_magic_function(lambda line: asked.append(line), magic_name="pip")
if {on_colab}:
    sys.modules["google.colab"] = types.ModuleType("google.colab")
assert shell.run_cell({address.COLAB_CELL.format(url=MADE_UP)!r}).success
print(asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"install --quiet --no-deps git+{MADE_UP}"] if on_colab else [])


def test_what_the_colab_cell_installs_is_the_package_alone(tmp_path):
    """Run its pip command on a clone of this repository: the package lands, nothing comes with it, and it imports."""
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "flashattn", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for name in files.stdout.split():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(clone)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "copy"], check=True)
    command = re.search(r"%pip (.*)", address.COLAB_CELL.format(url=clone.as_uri())).group(1)
    target = tmp_path / "site-packages"
    subprocess.run([sys.executable, "-m", "pip", *command.split(), "--target", str(target)], check=True)
    assert {re.split(r"[-.]", path.name)[0] for path in target.iterdir()} == {"flashattn"}
    code = "import sys; sys.path.insert(0, sys.argv[1]); import flashattn; print(flashattn.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.startswith(str(target))


def test_citation_is_of_this_version():
    import flashattn

    text = (ROOT / "CITATION.cff").read_text()
    assert f'version: "{flashattn.__version__}"' in text
    assert f"version = {{{flashattn.__version__}}}" in re.sub(r"<.*?>", "", (HTML / "book" / "intro.html").read_text())


def test_built_site_follows_a_made_up_address(copy):
    """Build two pages with it: the buttons, the card and the page for wrong addresses point to it."""
    for name in ("book", "flashattn"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (copy / "notebooks").glob("*.ipynb"):
        if path.stem != "01_memory_wall":
            path.unlink()
    (copy / "book" / "intro.md").write_text("# Home\n\n```{cover}\n```\n\n```{citation}\n```\n")
    (copy / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nparts: [{chapters: [{file: notebooks/01_memory_wall}, {file: book/references}]}]\n"
    )
    config = copy / "_config.yml"
    config.write_text(config.read_text().replace("execute_notebooks: cache", 'execute_notebooks: "off"'))
    address.set_address(MADE_UP, copy)
    build = subprocess.run(
        [Path(sys.executable).with_name("jupyter-book"), "build", copy, "--all", "--quiet"],
        capture_output=True,
        text=True,
    )
    html = copy / "_build" / "html"
    assert (html / "404.html").exists(), build.stdout[-2000:] + build.stderr[-2000:]
    chapter, home = (html / "notebooks" / "01_memory_wall.html").read_text(), (html / "book" / "intro.html").read_text()
    path = "notebooks/01_memory_wall.ipynb"
    assert f'href="{MADE_UP}"' in chapter and f"{MADE_UP}/issues" in chapter
    assert f'href="{address.colab_address(MADE_UP, path)}"' in chapter
    assert f'content="{SITE}_static/card.png"' in chapter
    assert SITE in re.sub(r"<.*?>", "", home)
    assert '<base href="/some.book/">' in (html / "404.html").read_text()
