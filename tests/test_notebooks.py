"""What every chapter must have: stripped outputs, pinned cells, prose that knows its numbers; and a life without Triton."""

import re
from pathlib import Path

import nbformat
import pytest
from processes import python

from flashattn.notebook import CLAIM

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
KEEP, COMPARE = "keep_output", "nbval-check-output"


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def tags(cell):
    return set(cell.metadata.get("tags", []))


def test_every_chapter_is_in_the_contents():
    listed = re.findall(r"file: notebooks/(\d\d_\w+)", (ROOT / "_toc.yml").read_text())
    assert [path.stem for path in CHAPTERS] == listed
    assert [int(name[:2]) for name in listed] == list(range(1, len(listed) + 1))
    assert len(listed) >= 10


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
class TestChapter:
    def test_outputs_are_stripped_but_for_the_pinned_ones(self, path):
        nbformat.validate(nbformat.read(path, as_version=4))
        pinned = [cell for cell in cells(path) if KEEP in tags(cell)]
        assert len(pinned) >= 3
        for cell in cells(path):
            if cell in pinned:
                assert COMPARE in tags(cell), "kept but not compared:\n" + cell.source
                # Without either of these nbval would pass the cell whatever it prints.
                assert cell.outputs and cell.execution_count, "pinned without output or count:\n" + cell.source
                assert all(out.get("name") == "stdout" or CLAIM in out.data for out in cell.outputs), cell.source
            else:
                assert COMPARE not in tags(cell), "compared but not kept:\n" + cell.source
                assert not cell.outputs and cell.execution_count is None, cell.source

    def test_metadata_is_the_same_on_every_machine(self, path):
        notebook = nbformat.read(path, as_version=4)
        assert set(notebook.metadata) == {"kernelspec", "language_info"}
        assert notebook.metadata.kernelspec.name == "python3"
        assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
        assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)

    def test_first_import_chooses_the_device(self, path):
        first = next(cell for cell in cells(path) if "colab" not in tags(cell))
        assert re.match(r"(#.*\n)*(import flashattn.notebook|from flashattn.notebook import)", first.source)

    def test_every_glued_number_is_computed(self, path):
        code = "\n".join(cell.source for cell in cells(path))
        prose = "\n".join(cell.source for cell in cells(path, "markdown"))
        used = set(re.findall(r"\{glue:\w+\}`([^`]+)`", prose))
        assert used, "no number in the prose was computed"
        literal = set(re.findall(r"glue\(\s*f?[\"']([^\"'{}]+)[\"']", code))
        prefix = {key.split("{")[0] for key in re.findall(r"glue\(\s*f[\"']([^\"']*\{[^\"']*)[\"']", code)}
        missing = {key for key in used - literal if not any(key.startswith(start) for start in prefix)}
        assert not missing

    def test_exercises_come_with_checked_solutions(self, path):
        stubs = [cell for cell in cells(path) if "exercise" in tags(cell)]
        solutions = [cell for cell in cells(path) if "solution" in tags(cell)]
        assert len(stubs) >= 4 and len(solutions) >= len(stubs)
        for cell in solutions:
            assert "hide-cell" in tags(cell)
        assert sum("must_fail(" in cell.source for cell in solutions) >= len(stubs)

    def test_reads_whole_without_triton(self, path):
        """Run the chapter with Triton hidden: cells marked `# needs Triton` are skipped in one line, the rest works."""
        code = (
            "import sys, nbformat, nbclient\n"
            "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
            "nbclient.NotebookClient(notebook, timeout=600, resources={'metadata': {'path': sys.argv[2]}}).execute()\n"
            "print(sum('Skipped: this cell needs Triton' in o.get('text', '') for c in notebook.cells for o in c.get('outputs', [])))\n"
        )
        skipped = python("-c", code, str(path), str(path.parent), without_triton=True)
        assert int(skipped) == sum(cell.source.startswith("# needs Triton") for cell in cells(path))
