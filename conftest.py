"""The option --results, for the tests and the notebooks alike: write what ran, where and with what as JSON."""

import json


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
    from flashattn.testing import machine_facts  # here: it imports torch, and most runs write no results

    write_results(path, machine_facts() | dict(counts=counts), sorted(tests, key=lambda test: test["test"]))


def write_results(path, facts, tests):
    """Write JSON with one line a test, so that a change of one test is a change of one line."""
    lines = ",\n".join("  " + json.dumps(test) for test in tests)
    with open(path, "w") as file:
        file.write(json.dumps(facts | {"tests": []}, indent=1).removesuffix("[]\n}") + "[\n" + lines + "\n ]\n}\n")
