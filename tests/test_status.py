"""What readers are told about measurements is what was recorded."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import status  # noqa: E402


@pytest.fixture(scope="module")
def collected():
    return status.collect_cases()


def test_status_page_is_rendered_from_the_results():
    assert (ROOT / "book" / "status.md").read_text() == status.status_page(), "run make status"


def test_robustness_page_is_rendered_from_the_ids_of_the_tests(collected):
    assert (ROOT / "book" / "robustness.md").read_text() == status.robustness_page(collected), "run make status"


def test_every_case_has_a_test(collected):
    tested = [name for ids, _, _ in collected["tests"] for name in ids]
    assert set(tested) == set(collected["cases"])
    assert all(ids for ids, _, _ in collected["tests"]), "a test without an id in test_cases.py"
    assert {where for *_, where in collected["tests"]} <= {"everywhere", *status.WHERE.values()}


def test_readme_table_is_rendered_from_the_csv():
    assert (ROOT / "README.md").read_text() == status.readme_text(), "run make status"


def test_recorded_gpu_run_is_green_and_complete():
    results = json.loads((ROOT / "tests" / "results" / "kernels.json").read_text())
    assert results["gpu"] and results["commit"] and results["counts"]["failed"] == 0 and results["counts"]["error"] == 0
    cases = {
        test["test"].split("[")[1].rstrip("]"): test
        for test in results["tests"]
        if "repeatability_in_full" in test["test"]
    }
    from test_kernels import FAMILY_CASES, GPU_CASES, GPU_FEATURE_CASES

    assert {case.id for case in GPU_CASES + FAMILY_CASES + GPU_FEATURE_CASES} <= set(cases)
    assert all(ratio <= 1 for test in cases.values() for ratio in test["ratios"].values())
    # Two tests waited for paged decoding when this ran; the other run has them.
    beyond = json.loads((ROOT / "tests" / "results" / "beyond.json").read_text())
    assert beyond["gpu"] and beyond["counts"]["failed"] == beyond["counts"]["error"] == beyond["counts"]["skipped"] == 0
    passed = {test["test"].split("::")[1].split("[")[0] for test in beyond["tests"] if test["outcome"] == "passed"}
    waited = {"test_page_ids_times_page_stride", "test_page_size"}
    assert waited <= passed and results["counts"]["skipped"] <= len(waited)
    files = {test["test"].split("::")[0] for test in beyond["tests"]}
    assert {f"tests/test_{name}.py" for name in ("atomic", "decode", "fp8", "paged", "sparse")} <= files


def test_recorded_fuzz_run_found_nothing():
    fuzz = json.loads((ROOT / "tests" / "results" / "fuzz.json").read_text())
    assert fuzz["gpu"] and fuzz["cases"] >= 2000 and fuzz["failures"] == []
    assert all(share <= 1 for shares in fuzz["worst"].values() for share in shares.values())


def test_recorded_run_on_two_gpus_is_green():
    results = json.loads((ROOT / "tests" / "results" / "two_gpus.json").read_text())
    assert results["gpu"] and results["counts"]["passed"] >= 2
    assert results["counts"]["failed"] == results["counts"]["error"] == results["counts"]["skipped"] == 0


def test_recorded_sanitizer_run_found_nothing_but_what_was_planted():
    sanitizer = json.loads((ROOT / "tests" / "results" / "sanitizer.json").read_text())
    runs = {(run["tool"], run["run"]): run["findings"] for run in sanitizer["runs"]}
    assert sanitizer["gpu"] and runs["memcheck", "work"] == runs["racecheck", "work"] == 0 < runs["memcheck", "plant"]


def test_recorded_browser_run_is_green_and_covers_every_page():
    from browser import MODES, PAGES

    results = json.loads((ROOT / "tests" / "results" / "browser.json").read_text())
    assert results["counts"]["failed"] == results["counts"]["error"] == 0
    visits = {(test["page"], test["mode"]): test for test in results["tests"] if "own_kb" in test}
    assert set(visits) == {(page, mode) for page in PAGES for mode in MODES}, "run make browser and make status"
    for visit in visits.values():
        assert visit["violations"] == 0 and visit["own_kb"] <= 600
    first_views = json.loads((ROOT / "tests" / "results" / "first_view.json").read_text())
    assert {test["page"] for test in first_views["tests"]} == set(PAGES) and first_views["counts"]["failed"] == 0
    assert all(test["first_view_ms"] < 1000 for test in first_views["tests"])
