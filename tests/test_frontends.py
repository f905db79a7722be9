"""The same interactive figure where a kernel runs: in JupyterLab, and with the ipywidgets 7 that Colab has."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
from browser import SCREENSHOTS, chromium

ROOT = Path(__file__).parents[1]
IPYWIDGETS_7 = ["ipywidgets==7.7.5", "ipython_genutils==0.2.0"]  # the last 7.7, and what it imports beyond its own
CELL = """\
from flashattn.explorer import Control, explore
def draw(n, kind):
    return f"<p><b>{n}</b> {kind}</p>", f"There are {n} {kind}."
explore(draw, n=Control([1, 2, 3], "how many"), kind=Control(["apples", "pears"], "fruit"))
"""


@contextmanager
def jupyterlab(folder):
    """Run JupyterLab on a folder, without settings of this machine; give its address."""
    home = {
        name: str(folder / ".home")
        for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    }
    log = folder / "log"
    options = [
        "--no-browser",
        "--port=0",
        "--IdentityProvider.token=",
        "--allow-root",
        "--LabApp.extension_manager=readonly",
    ]
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, "--LabApp.news_url=", f"--ServerApp.root_dir={folder}"],
            stdout=file, stderr=file, env=os.environ | home, cwd=folder,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://(?:localhost|127\.0\.0\.1):\d+/", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield found.group()
    finally:
        server.terminate()
        server.wait(30)


def test_widget_moves_in_jupyterlab(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(notebook, tmp_path / "figure.ipynb")
    with jupyterlab(tmp_path) as base, chromium() as browser:
        page = browser.new_page(viewport=dict(width=1280, height=900))
        page.set_default_timeout(120_000)
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(base) else route.abort())
        page.goto(f"{base}lab/tree/figure.ipynb?reset")
        page.locator(".jp-Notebook .jp-CodeCell").first.click()
        page.keyboard.press("Shift+Enter")
        status = page.locator(".jp-OutputArea [role=status]", has_text="There are")
        status.wait_for()
        assert status.inner_text() == "There are 1 apples."
        slider = page.locator(".jp-OutputArea [role=slider]").first
        slider.focus()
        slider.press("ArrowRight")
        page.get_by_text("There are 2 apples.").wait_for()
        page.locator(".jp-OutputArea select").select_option("pears")
        page.get_by_text("There are 2 pears.").wait_for()
        assert page.locator(".flashattn-explorer").count() == 0, "the widget is shown, not the page's form beside it"
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "jupyterlab.png")


def test_widget_moves_with_ipywidgets_7(tmp_path):
    """Install ipywidgets 7.7 in a folder that comes first, and use the figure in a kernel of its own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path / "seven"), *IPYWIDGETS_7], check=True)
    code = (
        CELL.replace("explore(draw", "figure = explore(draw")
        + """
import ipywidgets
from IPython.display import display
assert ipywidgets.__version__.startswith("7.7"), ipywidgets.__version__
display(figure)
slider, choice, view = figure.widget().children
assert type(figure.widget()).__module__.startswith("ipywidgets") and "There are 1 apples." in view.value
slider.value = 3
choice.value = "pears"
assert "There are 3 pears." in view.value, view.value
print("moved with", ipywidgets.__version__)
"""
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(notebook, tmp_path / "figure.ipynb")
    run = (
        "import sys, nbformat, nbclient\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=300, kernel_name='python3').execute()\n"
        "for out in notebook.cells[0].outputs: print(out.get('text') or sorted(out.data))\n"
    )
    path = os.pathsep.join([str(tmp_path / "seven"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", run, str(tmp_path / "figure.ipynb")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "moved with 7.7" in done.stdout
    assert "application/vnd.jupyter.widget-view+json" in done.stdout, done.stdout
