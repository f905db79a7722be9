"""Set the address of the published repository in every place that needs it.

    python book/_ext/address.py https://github.com/owner/name
    python book/_ext/address.py ""        # not published: no button, no link, no Colab cell

_config.yml holds the address; the site's buttons and links are made from it when the site is built. README.md,
CITATION.cff, pyproject.toml and the notebooks cannot read it, so this writes it there.
"""

import argparse
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
CONFIG_LINE = re.compile(r'^  url: "(.*)"', flags=re.M)
GITHUB = re.compile(r"https://github\.com/([\w-]+)/([\w.-]+?)/?")
BEGIN, END = "address: begin (make address writes this)", "address: end"
COLAB_ID = "colab"
COLAB_CELL = """\
# On Colab, install the package beside the torch, Triton and ipywidgets that are there; elsewhere do nothing.
import sys

if "google.colab" in sys.modules:
    %pip install --quiet --no-deps git+{url}"""


def read_address(root=ROOT):
    """Return the address that _config.yml holds, "" if the book is not published."""
    return CONFIG_LINE.search((root / "_config.yml").read_text()).group(1)


def check_address(url):
    """Return the address without a slash at its end; raise ValueError if it is neither empty nor on GitHub."""
    if not url:
        return ""
    match = GITHUB.fullmatch(url)
    if not match:
        raise ValueError(f"URL must be https://github.com/owner/name, or empty, got {url!r}")
    return "https://github.com/{}/{}".format(match[1], match[2].removesuffix(".git"))


def site_address(url):
    """Return where GitHub Pages serves the site of a repository, with a slash at its end; "" for ""."""
    if not url:
        return ""
    owner, name = GITHUB.fullmatch(url).groups()
    host = f"{owner.lower()}.github.io"
    return f"https://{host}/" if name.lower() == host else f"https://{host}/{name}/"


def colab_address(url, path):
    """Return the address that opens a notebook of the repository in Colab."""
    return url.replace("https://github.com/", "https://colab.research.google.com/github/") + f"/blob/main/{path}"


def marked_block(url, name):
    """Return the lines that stand between the marks of a file."""
    site = site_address(url)
    return {
        "README.md": f"Read it at <{site}>; its source is at <{url}>. To run it without installing anything, open a\n"
        f"[chapter in Colab]({colab_address(url, 'notebooks/01_memory_wall.ipynb')}).\n",
        "CITATION.cff": f'repository-code: "{url}"\nurl: "{site}"\n',
        "pyproject.toml": f'[project.urls]\nBook = "{site}"\nRepository = "{url}"\n',
    }[name]


def with_address(text, url, name):
    """Return the text of a marked file with the lines between its marks renewed."""
    before, _, rest = text.partition(BEGIN)
    ending, _, rest = rest.partition("\n")  # of the comment that holds the mark
    _, _, after = rest.partition(END)
    comment = "<!-- " if ending else "# "
    return f"{before}{BEGIN}{ending}\n{marked_block(url, name) if url else ''}{comment}{END}{after}"


def update_notebook(path, url):
    """Insert, renew or remove the Colab cell of a notebook; write the file only if that changes something."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.id != COLAB_ID]
    if url:
        first = next(i for i, cell in enumerate(cells) if cell.cell_type == "code")
        cell = nbformat.v4.new_code_cell(
            COLAB_CELL.format(url=url), id=COLAB_ID, metadata={"tags": ["colab", "remove-cell"]}
        )
        cells.insert(first, cell)
    if cells != notebook.cells:
        notebook.cells = cells
        nbformat.write(notebook, path)


def set_address(url, root=ROOT):
    """Write an address everywhere below root; "" takes it out again."""
    url = check_address(url)
    config = root / "_config.yml"
    config.write_text(CONFIG_LINE.sub(f'  url: "{url}"', config.read_text(), count=1))
    for name in ("README.md", "CITATION.cff", "pyproject.toml"):
        path = root / name
        path.write_text(with_address(path.read_text(), url, name))
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        update_notebook(path, url)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="https://github.com/owner/name, or an empty string")
    try:
        set_address(parser.parse_args().url)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"The address is {read_address() or 'empty'}: _config.yml, README.md, CITATION.cff, pyproject.toml, notebooks"
    )
