"""The option --results, for the tests and the notebooks alike: write what ran, where and with what as JSON."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import time


def pytest_addoption(parser):
    parser.addoption("--results", help="write the outcomes, and what tests recorded with record_property, to this file")


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--results")
    if not path:
        return
    reports = terminalreporter.stats
    counts = {outcome: len(reports.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped")}
    tests = [
        dict(test=report.nodeid, outcome=report.outcome, **dict(report.user_properties))
        for outcome in ("passed", "failed")
        for report in reports.get(outcome, [])
        if report.when == "call"
    ]
    write_results(path, machine_facts() | dict(counts=counts), sorted(tests, key=lambda test: test["test"]))


def write_results(path, facts, tests):
    """Write JSON with one line a test, so that a change of one test is a change of one line."""
    lines = ",\n".join("  " + json.dumps(test) for test in tests)
    with open(path, "w") as file:
        file.write(json.dumps(facts | {"tests": []}, indent=1).removesuffix("[]\n}") + "[\n" + lines + "\n ]\n}\n")


def machine_facts():
    """Return where and with what the tests ran."""
    import torch

    gpu = torch.cuda.is_available()
    return dict(
        date=time.strftime("%Y-%m-%d"),
        commit=os.environ.get("FLASHATTN_COMMIT") or _first_line("git", "rev-parse", "HEAD"),
        gpu=torch.cuda.get_device_name() if gpu else None,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        processor=platform.machine(),
    )


def _first_line(*command):
    printed = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(__file__)).stdout
    return printed.strip().split("\n")[0] or None
