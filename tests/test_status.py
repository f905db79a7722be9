"""What readers are told about measurements is what was recorded."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import status  # noqa: E402


def test_status_page_is_rendered_from_the_results():
    assert (ROOT / "book" / "status.md").read_text() == status.status_page(), "run make status"


def test_readme_table_is_rendered_from_the_csv():
    assert (ROOT / "README.md").read_text() == status.readme_text(), "run make status"


def test_recorded_gpu_run_is_green_and_complete():
    results = json.loads((ROOT / "tests" / "results" / "kernels.json").read_text())
    assert results["gpu"] and results["commit"] and results["counts"]["failed"] == 0 and results["counts"]["error"] == 0
    cases = [test for test in results["tests"] if "in_full" in test["test"]]
    from test_kernels import FAMILY_CASES, GPU_CASES

    assert len(cases) == len(GPU_CASES) + len(FAMILY_CASES)
    assert all(ratio <= 1 for test in cases for ratio in test["ratios"].values())
