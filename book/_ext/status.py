"""Render book/status.md and README's results table from what test runs and measurements recorded.

python book/_ext/status.py
"""

import json
import re
from pathlib import Path

from flashattn import cost
from flashattn.bench import DATA, load_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "results"
TITLES = {"kernels": "Kernel tests on a GPU", "notebooks": "Notebooks on a GPU, under nbval"}
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
    counts = results["counts"]
    lines = [
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped; {len(cases)} are cases "
        "held to the error budget, each run twice for equal bits.",
        "",
        "Worst error as a share of the budget (1 is the limit):",
        "",
        "| dtype | out | lse | dq | dk | dv |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, ratios in sorted(worst.items()):
        lines.append(
            f"| {dtype} | " + " | ".join(f"{ratios[name]:.2f}" for name in ("out", "lse", "dq", "dk", "dv")) + " |"
        )
    return lines


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
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        lines += [f"## {TITLES[path.stem]}", "", machine_line(results), ""]
        if any("ratios" in test for test in results["tests"]):
            lines += kernel_section(results)
        else:
            counts = results["counts"]
            lines += [f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped."]
        lines += [""]
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


def tflops(row):
    """Return a timed row's rate in TFLOP/s, by the convention of cost.attention_flops."""
    matmuls = {"forward": cost.FORWARD_MATMULS, "backward": cost.BACKWARD_MATMULS}[row["direction"]]
    sizes = (row[name] for name in ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim"))
    return cost.attention_flops(*sizes, matmuls=matmuls, causal=row["causal"]) / (row["p50"] * 1e-3) / 1e12


def results_table():
    """Return README's table: TFLOP/s of each implementation on the shapes of suite core, from the recorded CSV."""
    lines = []
    for path in sorted(DATA.glob("*.csv")):
        rows = load_rows(path.stem, suite="core", metric="time")
        if not rows:
            continue
        first = rows[0]
        rates = {
            (row["head_dim"], row["seqlen_q"], row["causal"], row["impl"], row["direction"]): f"{tflops(row):.0f}"
            for row in rows
        }
        implementations = list(dict.fromkeys(row["impl"] for row in rows))
        lines += [
            f"TFLOP/s, forward / backward, {first['dtype']}, {first['batch'] * first['seqlen_q']} tokens of width "
            f"{first['heads'] * first['head_dim']}, on one {first['gpu']} ({first['date']}, torch {first['torch']}, "
            f"triton {first['triton']}, commit {first['commit'][:12]}):",
            "",
            "| head_dim | N | causal | " + " | ".join(implementations) + " |",
            "|---|---|---|" + "---|" * len(implementations),
        ]
        for shape in dict.fromkeys(key[:3] for key in rates):
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
    (ROOT / "README.md").write_text(readme_text())
    (ROOT / "book" / "status.md").write_text(status_page())
    print("book/status.md and README.md rendered")
