"""Render book/status.md and README's results table from what was recorded, book/robustness.md from the tests' ids.

python book/_ext/status.py
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from flashattn import cost
from flashattn.bench import DATA, load_rows
from flashattn.goals import check_goals

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "results"
TITLES = {
    "kernels": "Kernel tests on a GPU",
    "beyond": "Decoding, 8 bits, sparse masks and atomic adds on a GPU",
    "two_gpus": "Tests on two GPUs",
    "fuzz": "Random cases on a GPU",
    "sanitizer": "Under compute-sanitizer",
    "notebooks": "Notebooks on a GPU, under nbval",
    "browser": "The site in a browser, the network cut off",
}
RESULT_NAMES = ("out", "lse", "dq", "dk", "dv")
WHERE = {"two_gpus": "two GPUs", "gpu": "GPU"}
COLUMNS = ("flashattn", "flashattn_portable", "sdpa_flash", "sdpa_cudnn", "flex", "fa3")  # of README's table
BEGIN, END = "<!-- results: begin (make status writes this) -->", "<!-- results: end -->"


def kernel_section(results):
    """Return the lines about one recorded run of the kernel tests."""
    worst = {}
    cases = [test for test in results["tests"] if "ratios" in test]
    for test in cases:
        dtype = test["test"].split("[")[1].split("-")[0]
        for name, ratio in test["ratios"].items():
            kept = worst.setdefault(dtype, {}).get(name, -1)
            worst[dtype][name] = max(kept, ratio)
    return [
        f"{counts_line(results)}; {len(cases)} are cases held to the error budget, each run twice for equal bits.",
        "",
        "Worst error as a share of the budget (1 is the limit):",
        "",
        *budget_table(worst),
    ]


def budget_table(worst):
    """Return the lines of a table of the worst shares of the budget, {dtype: {result: share}}."""
    lines = ["| dtype | out | lse | dq | dk | dv |", "|---|---|---|---|---|---|"]
    for dtype, shares in sorted(worst.items()):
        lines.append(f"| {dtype} | " + " | ".join(f"{shares[name]:.2f}" for name in RESULT_NAMES) + " |")
    return lines


def fuzz_section(results):
    """Return the lines about one run of the fuzzer."""
    return [
        f"{results['cases']} cases drawn from seed {results['seed']}, lengths to {results['longest']}, each run twice: "
        f"{results['cases'] - len(results['failures'])} within the error budget, finite and the same to the bit. "
        "Worst error as a share of the budget:",
        "",
        *budget_table(results["worst"]),
    ]


def sanitizer_section(results):
    """Return the lines about one run of compute-sanitizer."""
    titles = {"work": f"{len(results['calls'])} calls, forward and backward", "plant": "a planted write past the end"}
    lines = ["PyTorch's caching allocator is off, so that the end of a tensor is the end of its memory.", ""]
    lines += ["| tool | what ran | findings |", "|---|---|---|"]
    return lines + [f"| {run['tool']} | {titles[run['run']]} | {run['findings']} |" for run in results["runs"]]


def browser_section(results):
    """Return the lines about one run of the tests in a browser: a row a page."""
    visits = {(test["page"], test["mode"]): test for test in results["tests"] if "own_kb" in test}
    version = next(iter(visits.values()))["browser"]
    alone = json.loads((RESULTS / "first_view.json").read_text())["tests"]
    first_views = {test["page"]: test["first_view_ms"] for test in alone}
    lines = [
        f"{counts_line(results)}. Chromium {version}, the site served on localhost. Weight is that of the page itself, "
        "uncompressed, without the files that all pages share; first view is the first contentful paint with an empty "
        "cache, the median of three, in a run of its own; axe counts the violations that axe-core finds in both modes.",
        "",
        "| page | kB | requests | first view, ms | figures | controls | frames | axe |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for page in dict.fromkeys(test["page"] for test in visits.values()):
        light, dark = visits[page, "light"], visits[page, "dark"]
        lines.append(
            f"| {Path(page).stem} | {light['own_kb']:.0f} | {light['requests']} | {first_views[page]} | "
            f"{light['explorers']} | {light['controls']} | {light['frames']} | "
            f"{light['violations'] + dark['violations']} |"
        )
    return lines


def recorded_gpus():
    """Return the names of the GPUs with recorded measurements."""
    return sorted({path.stem for path in DATA.glob("*.csv")} - {"targets", "blocks", "hopper", "training"})


def goals_section(gpu):
    """Return the lines about what the kernels are meant to reach, and how far the recorded measurements are."""
    commits, both = {}, set()
    for row in load_rows(gpu):
        commits.setdefault(row["commit"][:12], {})[row["suite"]] = None
        both |= {row["suite"]} if row["impl"] == "flashattn_portable" else set()
    measured = "; ".join(f"{', '.join(suites)} at {commit}" for commit, suites in commits.items())
    lines = [f"Measured by `make bench` on {gpu}: {measured}. Speeds are ratios of medians."]
    if both:
        lines += [
            f"Suite {', '.join(sorted(both))} has rows of both backends, `flashattn` for what runs by default and "
            "`flashattn_portable`; the rows of the other suites are older, and all of the portable kernels."
        ]
    lines += ["", "| target | measured | worst cell | cells | reached |", "|---|---|---|---|---|"]
    for goal in check_goals(gpu):
        measured = "–" if goal.measured is None else f"{goal.measured:.3g}"
        reached = {True: "yes", False: "no", None: "not measured"}[goal.reached]
        lines.append(f"| {goal.rule} | {measured} | {goal.where or '–'} | {goal.n_cells} | {reached} |")
    return lines


def counts_line(results):
    """Return one line that counts the outcomes of a test run."""
    return "{passed} passed, {failed} failed, {skipped} skipped".format(**results["counts"])


def machine_line(results):
    """Return one line that says where and with what a run was made."""
    where = f"{results['gpu']}, driver {results['driver']}" if results["gpu"] else f"CPU ({results['processor']})"
    versions = f"Python {results['python']}, torch {results['torch']}, triton {results['triton']}"
    return f"{where}; {versions}; {results['date']}; commit `{(results['commit'] or 'unknown')[:12]}`."


def pinned_versions():
    """Return the versions of what matters most to a build, from requirements.txt."""
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), flags=re.M))
    return ", ".join(
        f"{name} {pins[name]}" for name in ("torch", "triton", "numpy", "jupyter-book", "Sphinx", "myst-nb")
    )


def status_page():
    """Return the text of book/status.md."""
    lines = ["# Status", "", "This page is written by `make status` from recorded runs.", ""]
    sections = {
        "kernels": kernel_section,
        "fuzz": fuzz_section,
        "sanitizer": sanitizer_section,
        "browser": browser_section,
    }
    for path in sorted(set(RESULTS.glob("*.json")) - {RESULTS / "first_view.json"}):  # browser_section reads that one
        results = json.loads(path.read_text())
        lines += [f"## {TITLES[path.stem]}", "", machine_line(results), ""]
        section = sections.get(path.stem, lambda results: [counts_line(results) + "."])
        lines += [*section(results), ""]
    lines += ["## Targets", ""]
    for gpu in recorded_gpus():
        lines += [*goals_section(gpu), ""]
    lines += [
        "## This build",
        "",
        f"Built with {pinned_versions()}, as pinned in `requirements.txt`. The notebooks, as executed for this",
        "site on a machine without a GPU:",
        "",
        "```{nb-exec-table}",
        "```",
        "",
    ]
    return "\n".join(lines)


def collect_cases():
    """Return what pytest collects from tests/test_cases.py, tests for GPUs included.

    "cases" maps each id to [reports, rule], as tests/cases.py does; "tests" lists [ids, function, where it runs].
    """
    command = [sys.executable, __file__, "collect"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def print_cases():
    """Print what ``collect_cases`` returns, as the last line; it runs in a process of its own."""
    import pytest

    class Collector:
        def pytest_collection_finish(self, session):
            self.items = session.items

    collector = Collector()
    options = ["--collect-only", "--noconftest", "--quiet", "-p", "no:cacheprovider"]
    status = pytest.main([str(ROOT / "tests" / "test_cases.py"), *options], plugins=[collector])
    if status != pytest.ExitCode.OK:
        sys.exit(int(status))
    from cases import CASES  # pytest has put tests/ on the path

    tests = [
        (re.findall(r"\bB\d+\b", item.name.partition("[")[2]), item.originalname, where_it_runs(item))
        for item in collector.items
    ]
    print(json.dumps(dict(cases=CASES, tests=tests)))


def where_it_runs(item):
    """Say where a collected test runs, from its marks."""
    return next((where for mark, where in WHERE.items() if item.get_closest_marker(mark)), "everywhere")


def robustness_page(collected):
    """Return the text of book/robustness.md; collected is what ``collect_cases`` returns."""
    lines = [
        "# Robustness",
        "",
        "Each row is something that attention kernels have got wrong in public, with the reports, and what must hold",
        "here instead. The last column names its tests in `tests/test_cases.py`, as pytest collects them, and how many",
        "run everywhere (in Triton's interpreter where there is no GPU), on a GPU, or on two.",
        "",
        "| case | reported as | what must hold | tests |",
        "|---|---|---|---|",
    ]
    for name, (reports, rule) in collected["cases"].items():
        linked = re.sub(r"([\w.-]+/)([\w.-]+)#(\d+)", r"[\2#\3](https://github.com/\1\2/issues/\3)", reports)
        counts = {}
        for ids, test, where in collected["tests"]:
            if name in ids:
                counts.setdefault(test, Counter())[where] += 1
        tests = (
            f"`{test}` (" + ", ".join(f"{n} {where}" for where, n in places.items()) + ")"
            for test, places in counts.items()
        )
        lines.append(f"| {name} | {linked} | {rule} | {', '.join(tests)} |")
    return "\n".join([*lines, ""])


def tflops(row):
    """Return a timed row's rate in TFLOP/s, by the convention of cost.attention_flops."""
    matmuls = {"forward": cost.FORWARD_MATMULS, "backward": cost.BACKWARD_MATMULS}[row["direction"]]
    sizes = (row[name] for name in ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim"))
    return cost.attention_flops(*sizes, matmuls=matmuls, causal=row["causal"]) / (row["p50"] * 1e-3) / 1e12


def results_table():
    """Return README's table: TFLOP/s of each implementation on the shapes of suite core, from the recorded CSV."""
    lines = []
    for gpu in recorded_gpus():
        rows = [row for row in load_rows(gpu, suite="core", metric="time") if row["impl"] in COLUMNS]
        if not rows:
            continue
        first = rows[0]
        rates = {
            (row["head_dim"], row["seqlen_q"], row["causal"], row["impl"], row["direction"]): f"{tflops(row):.0f}"
            for row in rows
        }
        implementations = [impl for impl in COLUMNS if any(row["impl"] == impl for row in rows)]
        lines += [
            f"TFLOP/s, forward / backward, {first['dtype']}, {first['batch'] * first['seqlen_q']} tokens of width "
            f"{first['heads'] * first['head_dim']}, on one {first['gpu']} ({first['date']}, torch {first['torch']}, "
            f"triton {first['triton']}, commit {first['commit'][:12]}):",
            "",
            "| head_dim | N | causal | " + " | ".join(implementations) + " |",
            "|---|---|---|" + "---|" * len(implementations),
        ]
        for shape in sorted({key[:3] for key in rates}):
            cells = [
                " / ".join(rates.get((*shape, impl, direction), "–") for direction in ("forward", "backward"))
                for impl in implementations
            ]
            lines.append(f"| {shape[0]} | {shape[1]} | {'yes' if shape[2] else 'no'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def readme_text():
    """Return README.md with its table renewed."""
    text = (ROOT / "README.md").read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:before] + "\n\n" + results_table() + "\n\n" + text[after:]


if __name__ == "__main__":
    if sys.argv[1:] == ["collect"]:
        print_cases()
    else:
        (ROOT / "README.md").write_text(readme_text())
        (ROOT / "book" / "status.md").write_text(status_page())
        (ROOT / "book" / "robustness.md").write_text(robustness_page(collect_cases()))
        print("book/status.md, book/robustness.md and README.md rendered")
