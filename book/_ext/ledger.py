"""Render book/claims.md, the verdict on each claim of the source article, from what the chapters' cells recorded.

python book/_ext/ledger.py
"""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "book" / "claims.md"
CLAIM = "application/vnd.flashattn.claim+json"  # as in flashattn/notebook.py, which would bring PyTorch with it
VERDICTS = ("holds", "holds with limits", "wrong", "advice", "open")
INTRODUCTION = """# The ledger of claims

The book grew out of a practitioner's article on FlashAttention and Triton. Here is each of its 51 claims in our own
words, with the verdict, the number that decided it, and where that number comes from; the link leads to the experiment.
A claim that makes two statements has two rows. *Holds with limits*: some parts of the claim held and others did not.
*Advice*: there is nothing to measure. *Open*: not decided yet.
"""
OUTRO = """
This page is written by `make status` from the outputs of the chapters' cells, which the tests run again and compare.
Each verdict follows from comparisons of measured numbers with limits that stand in the cell.
"""


class Evidence(NamedTuple):
    """A recorded verdict and the cell that it comes from."""

    chapter: Path
    cell: dict
    output: dict
    record: dict


def load_table():
    """Return ({claim: our wording}, {claim: what will settle it}) from book/claims.yml."""
    table = yaml.safe_load((ROOT / "book" / "claims.yml").read_text())
    return table["claims"], table["open"]


def collect_evidence():
    """Return what the committed notebooks recorded, a list of Evidence in the order of the chapters."""
    return [
        Evidence(path, cell, output, output.data[CLAIM])
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", [])
        if CLAIM in output.get("data", {})
    ]


def decided_by(claim, wording, found):
    """Return the third column of a claim's row: the number, where it comes from, and the link to the experiment."""
    record = found.record
    text = f"{record['number']} ({record['where']})" if record["where"] else record["number"]
    cards = sorted(set(re.findall(r"[AH]100", wording)))  # every GPU that the article names; we had neither
    if cards:
        text += f", judged without an {' or '.join(cards)}"
    return f"{text}: [chapter {int(found.chapter.name[:2])}](#claim-{claim.lower()})"


def claims_page():
    """Return the text of book/claims.md; raise KeyError where a claim has neither evidence nor a note."""
    claims, waiting = load_table()
    evidence = {found.record["claim"]: found for found in collect_evidence()}
    rows, counts = [], Counter()
    for claim, wording in claims.items():
        if claim in evidence:
            verdict, reason = evidence[claim].record["verdict"], decided_by(claim, wording, evidence[claim])
        else:
            verdict, reason = "open", waiting[claim]
        counts[verdict] += 1
        rows.append(f"| **{claim}** {wording} | {verdict} | {reason} |")
    summary = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    head = ["| claim | verdict | decided by |", "|---|---|---|"]
    return "\n".join([INTRODUCTION, f"Of {len(rows)} rows: {summary}.", "", *head, *rows, OUTRO])


if __name__ == "__main__":
    PAGE.write_text(claims_page())
    print("book/claims.md rendered")
