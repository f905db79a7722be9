"""Set-up for every test: the interpreter where there is no GPU, poisoned memory, and results written as JSON."""

import json
import os
import platform
import subprocess
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import flashattn.notebook  # noqa: E402, I001  first: it switches the interpreter on where there is no GPU
import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty and its kin return with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    """Return the device the kernels run on here."""
    return flashattn.notebook.device


def pytest_addoption(parser):
    parser.addoption("--results", help="write what the tests recorded (record_property) to this JSON file")


def pytest_collection_modifyitems(config, items):
    """Leave GPU tests out where there is no GPU; skip kernel tests, with the reason, where there is no Triton."""
    if not flashattn.notebook.HAS_GPU:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    if not flashattn.notebook.HAS_TRITON:
        for item in items:
            if item.get_closest_marker("triton"):
                item.add_marker(pytest.mark.skip(reason="Triton is not installed on this platform"))


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--results")
    if not path:
        return
    reports = terminalreporter.stats
    tests = [
        dict(test=report.nodeid, outcome=report.outcome, **dict(report.user_properties))
        for outcome in ("passed", "failed")
        for report in reports.get(outcome, [])
        if report.when == "call"
    ]
    counts = {outcome: len(reports.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped")}
    with open(path, "w") as file:
        json.dump(dict(machine_facts(), counts=counts, tests=sorted(tests, key=lambda t: t["test"])), file, indent=1)
        file.write("\n")


def machine_facts():
    """Return where and with what the tests ran."""
    import importlib.metadata

    git = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    has_gpu = flashattn.notebook.HAS_GPU
    return dict(
        date=time.strftime("%Y-%m-%d"),
        commit=os.environ.get("FLASHATTN_COMMIT") or commit or None,
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        driver=_driver_version() if has_gpu else None,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=importlib.metadata.version("triton") if flashattn.notebook.HAS_TRITON else None,
        processor=platform.machine(),
    )


def _driver_version():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().split("\n")[0]
