"""Execute notebooks side by side, into the jupyter-cache that the site is built from, or in place.

    python book/_ext/execute.py --cache _build/.jupyter_cache --jobs 2 notebooks/*.ipynb
    python book/_ext/execute.py --in-place notebooks/*.ipynb

Sphinx would execute them one after another. A notebook whose cells have not changed since it was cached is not run
again, unless the package changed: then the cache is emptied.
"""

import argparse
import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
# What stays in a notebook's metadata: what an editor adds beyond it changes from machine to machine.
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def package_hash():
    """Return a hash of everything the notebooks import."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "flashattn").rglob("*")):
        if path.suffix in {".py", ".js", ".csv"}:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def execute(path):
    """Execute one notebook in its own folder and return (path, notebook, seconds); raise if a cell does."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    client = NotebookClient(
        notebook,
        timeout=600,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,  # timestamps would keep the cached notebook from matching its source
        store_widget_state=False,  # pages show the HTML form of an explorer, and need no widget's state
        coalesce_streams=True,  # one output for what one cell prints, however it was flushed
        extra_arguments=["--log-level=40"],  # ipykernel warns about its own default transport otherwise
    )
    client.execute()
    return path, notebook, time.perf_counter() - start


def clean(notebook):
    """Strip what must not be committed; keep the outputs of cells tagged keep_output."""
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code" and "keep_output" not in (tags or []):
            cell.outputs, cell.execution_count = [], None


def main():
    """Execute what needs it; print a line a notebook; exit 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("notebooks", type=Path, nargs="+")
    options = parser.parse_args()

    paths, cache = [path.resolve() for path in options.notebooks], None
    if options.cache:
        cache = get_cache(options.cache)
        stamp, package = options.cache / "package.sha256", package_hash()
        if stamp.exists() and stamp.read_text() != package:
            cache.clear_cache()
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(package)
        paths = [path for path in paths if not _is_cached(cache, path)]
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(execute, path) for path in paths]):
            try:
                path, notebook, seconds = done.result()
            except Exception as error:
                failed = True
                print(f"   failed: {error}", flush=True)
                continue
            if options.in_place:
                clean(notebook)
                nbformat.write(notebook, path)
            if cache:
                _store(cache, path, notebook, seconds)
            print(f"   {path.name}: {seconds:.0f} s", flush=True)
    sys.exit(failed)


def _is_cached(cache, path):
    try:
        cache.match_cache_notebook(nbformat.read(path, as_version=4))
    except KeyError:
        return False
    return True


def _store(cache, path, notebook, seconds):
    cache.cache_notebook_bundle(
        CacheBundleIn(notebook, str(path), data={"execution_seconds": seconds}), check_validity=False, overwrite=True
    )


if __name__ == "__main__":
    main()
