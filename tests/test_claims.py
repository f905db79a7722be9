"""The ledger of claims: each claim is judged by a cell that ran, and all that is said about it agrees with that cell."""

import functools
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
HTML = ROOT / "_build" / "html"
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import ledger  # noqa: E402

from flashattn.notebook import CLAIM, judge  # noqa: E402

CLAIMS, WAITING = ledger.load_table()
EVIDENCE = ledger.collect_evidence()
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
# What may be undecided: what later chapters build, and, until their measurements exist, what real use decides.
MAY_BE_OPEN = {"C48", "C03", "C11", "C12", "C44"}
# The claims that chapter 11 decides; they may wait only while it does not exist.
CHAPTER_11 = {"C01", "C03", "C04", "C09", "C11", "C12", "C41", "C42", "C43", "C44", "C50"}
HEADING = re.compile(r"Claim (C\d\d[ab]?)(: (.*))?$", re.M)
MENTION = re.compile(r"\b(C\d\d[ab]?)[,:] (holds with limits|holds|wrong|advice|open)\b")


@functools.cache
def prose(path):
    """Return the markdown of a chapter or a page."""
    if path.suffix == ".md":
        return path.read_text()
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")


def test_every_claim_has_its_row():
    assert {claim[:3] for claim in CLAIMS} == {f"C{i:02}" for i in range(1, 52)}
    assert list(CLAIMS) == sorted(CLAIMS)
    split = {claim[:3] for claim in CLAIMS if len(claim) > 3}
    assert {"C25", "C38", "C39"} <= split
    assert all({f"{claim}a", f"{claim}b"} <= set(CLAIMS) and claim not in CLAIMS for claim in split)
    assert ledger.CLAIM == CLAIM


def test_every_claim_is_judged_once():
    judged = [found.record["claim"] for found in EVIDENCE]
    assert len(judged) == len(set(judged)), "a claim is judged in two cells"
    assert set(judged) <= set(CLAIMS), "a cell judges a claim that book/claims.yml does not have"
    assert not set(judged) & set(WAITING), "judged now: take it out of `open` in book/claims.yml"
    assert set(judged) | set(WAITING) == set(CLAIMS), "a claim without evidence"


def test_only_what_must_wait_is_open():
    chapter_11 = any(path.name.startswith("11_") for path in CHAPTERS)
    assert set(WAITING) <= {"C48"} | (set() if chapter_11 else CHAPTER_11)
    assert {found.record["claim"] for found in EVIDENCE if found.record["verdict"] == "open"} <= MAY_BE_OPEN


@pytest.mark.parametrize("found", EVIDENCE, ids=lambda found: found.record["claim"])
def test_evidence_is_a_cell_that_ran_and_says_so(found):
    record = found.record
    assert {"keep_output", "nbval-check-output"} <= set(found.cell.metadata.tags), "nbval must compare it again"
    assert found.cell.execution_count, "it was not run"
    assert "judge(" in found.cell.source and f'"{record["claim"]}"' in found.cell.source
    assert f"{record['claim']}: {record['verdict']}" in found.output.data["text/plain"].splitlines()
    assert record["number"] and record["number"] in found.output.data["text/plain"]
    held = list(record["parts"].values())
    if held:
        expected = "holds" if all(held) else "holds with limits" if any(held) else "wrong"
        assert record["verdict"] == expected and record["where"]
    else:
        assert record["verdict"] in ("advice", "open")


@pytest.mark.parametrize("found", EVIDENCE, ids=lambda found: found.record["claim"])
def test_label_stands_before_the_verdict(found):
    claim = found.record["claim"]
    label = f"(claim-{claim.lower()})=\n:::{{admonition}} Claim {claim}: {found.record['verdict']}\n"
    assert [path.name for path in CHAPTERS if label in prose(path)] == [found.chapter.name]
    assert sum(prose(path).count(f"(claim-{claim.lower()})=") for path in CHAPTERS) == 1


@pytest.mark.parametrize("path", [*CHAPTERS, *sorted((ROOT / "book").glob("*.md"))], ids=lambda path: path.stem)
def test_no_other_verdict_is_told(path):
    """Whatever a heading or a remark such as "(C34: wrong)" says is the verdict of the cell that decided."""
    verdicts = {found.record["claim"]: found.record["verdict"] for found in EVIDENCE}
    verdicts |= {claim: None for claim in WAITING}
    text = prose(path)
    told = [(match[1], match[3]) for match in HEADING.finditer(text) if match[2]] + MENTION.findall(text)
    for claim, verdict in told:
        assert claim in verdicts, f"{claim} is not in the ledger"
        assert verdicts[claim] in (verdict, None), f"{path.name} says that {claim} {verdict}"


@pytest.mark.parametrize("found", EVIDENCE, ids=lambda found: found.record["claim"])
def test_other_chapters_lead_to_the_deciding_cell(found):
    claim = found.record["claim"]
    for path in set(CHAPTERS) - {found.chapter}:
        for box in re.findall(rf"\{{admonition\}} Claim {claim}: .*?\n:::", prose(path), flags=re.S):
            assert f"(#claim-{claim.lower()})" in box, f"{path.name}: {box}"


def test_ledger_is_rendered_from_the_cells():
    assert ledger.PAGE.read_text() == ledger.claims_page(), "run make status"


def test_claim_without_evidence_is_noticed(monkeypatch):
    monkeypatch.setattr(ledger, "collect_evidence", lambda: EVIDENCE[1:])
    with pytest.raises(KeyError, match=EVIDENCE[0].record["claim"]):
        ledger.claims_page()


def test_every_link_of_the_ledger_leads_to_the_verdict():
    """On the built site: the anchor exists, and the verdict stands behind it."""
    page = (HTML / "book" / "claims.html").read_text()
    for found in EVIDENCE:
        claim = found.record["claim"]
        target = f"../notebooks/{found.chapter.stem}.html"
        assert f'href="{target}#claim-{claim.lower()}"' in page, claim
        chapter = (HTML / "book" / target).resolve().read_text()
        (at,) = (match.end() for match in re.finditer(f'id="claim-{claim.lower()}"', chapter))
        behind = re.sub(r"<[^>]+>", "", chapter[at : at + 400])
        assert f"Claim {claim}: {found.record['verdict']}" in behind, claim
        assert found.record["number"] in re.sub(r"<[^>]+>", "", chapter).replace("&#39;", "'").replace("&gt;", ">"), (
            claim
        )


def shown(monkeypatch, *args, **kwargs):
    """Return what judge displays, as {type: content}."""
    displays = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: displays.append(data))
    judge(*args, **kwargs)
    (data,) = displays
    return data


@pytest.mark.parametrize(
    "parts, verdict",
    [
        (dict(a=True, b=True), "holds"),
        (dict(a=True, b=False), "holds with limits"),
        (dict(a=False, b=False), "wrong"),
    ],
)
def test_judge_makes_the_verdict_of_the_parts(parts, verdict, monkeypatch):
    data = shown(monkeypatch, "C99", number="3 of 4 bytes", where="arithmetic", **parts)
    assert data[CLAIM]["verdict"] == verdict and data[CLAIM]["number"] == "3 of 4 bytes"
    assert f"C99: {verdict}" in data["text/plain"].splitlines()


def test_judge_without_parts(monkeypatch):
    advice = shown(monkeypatch, "C99", advice="nothing to measure")
    assert advice[CLAIM]["verdict"] == "advice" and "nothing to measure" in advice["text/plain"]
    assert shown(monkeypatch, "C99", open="chapter 13")[CLAIM]["verdict"] == "open"


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        (dict(number="1 s", where="here", part=0.5), TypeError, "`part` must be True or False, got 0.5"),
        (dict(), ValueError, "C99 must have parts, `advice` or `open`, and only one of them"),
        (dict(advice="a", open="b"), ValueError, "only one of them"),
        (dict(part=True), ValueError, "C99 must have `number` and `where`, got '' and ''"),
    ],
)
def test_judge_refuses(kwargs, error, message):
    with pytest.raises(error, match=re.escape(message)):
        judge("C99", **kwargs)
