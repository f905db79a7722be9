"""What the prose says: no number with a unit that nothing accounts for, no word that is not one.

A typed number is accounted for by a cell of its chapter (its source or its pinned output), by a citation in the same
paragraph, by arithmetic that the sentence spells out, by the claim of the source article that the paragraph names, or by
a date and a machine in the same paragraph or table: then it records a measurement. Numbers by `glue` are not typed.
"""

import ast
import functools
import math
import re
import sys
from pathlib import Path

import nbformat
import pytest
from spellchecker import SpellChecker

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import ledger  # noqa: E402

CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "book").glob("*.md"))]
# Scripts write these pages; tests/test_status.py and tests/test_claims.py compare them with what the scripts write.
RENDERED = {"status.md", "robustness.md", "claims.md"}

NUMBER = r"\d{1,3}(?: \d{3})+(?:\.\d+)?|\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"[kKMGT]i?B(?:/s)?|bytes?|bits?|ms|µs|us|ns|s|seconds|[kKMGT]?FLOPs?(?:/s|/byte)?|[kMG]?Hz|%|percent|times|×(?!\s*[\w$])"
    r"|tokens(?:/s)?|registers|elements|products|numbers|lines|settings|stages|warps|threads|SMs|cores"
)
TYPED = re.compile(
    rf"(?<![\w.,\-−^])(?:(?P<low>{NUMBER})\$?\s?(?:to|and|or|–|against)\s\$?)?(?P<number>{NUMBER})\$?\s?(?P<unit>{UNIT})(?![\w/])"
)
FACTOR = rf"(?:{NUMBER})²?"
ARITHMETIC = re.compile(rf"({FACTOR}(?:\s?[·/]\s?{FACTOR})+)(?: bytes)?((?:\s?[=≈]\s?(?:{NUMBER})(?:\s?(?:{UNIT}))?)+)")
RECORD = re.compile(r"(?=.*\b20\d\d-\d\d-\d\d\b)(?=.*\b(?:H200|Triton \d))", re.S)
SCALES = [1, 1e3, 1e6, 1e9, 1e12, 2**10, 2**20, 2**30]


def value(text):
    """Return the number that is written so, with commas or spaces between thousands."""
    return float(re.sub("[, ]", "", text))


def read_chapter(path):
    """Return (prose cells, what the code cells say and pinned)."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    pinned = [output.get("text") or output.data["text/plain"] for cell in cells for output in cell.get("outputs", [])]
    return [cell.source for cell in cells if cell.cell_type == "markdown"], "\n".join(code + pinned)


def paragraphs(text):
    """Split markdown without its code into paragraphs and list items; a table goes with the paragraphs around it."""
    text = re.sub(r"```.*?```|`[^`]*`(?!\w)", lambda match: "" if "\n" in match[0] else "`", text, flags=re.S)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    for i, part in enumerate(parts):
        yield "\n".join(parts[max(0, i - 1) : i + 2]) if part.startswith("|") else part


def rounds_to(result, text):
    """Say whether a result, rounded to as many digits as the text shows, is the number that the text shows."""
    digits = len(re.sub(r"\D", "", text).lstrip("0"))
    return digits > 0 and math.isclose(float(f"{result:.{digits}g}"), value(text))


def computed_here(paragraph):
    """Return the numbers of products and quotients that the paragraph writes out and that are right."""
    found = set()
    for left, right in ARITHMETIC.findall(paragraph):
        result = 1.0
        for operator, number, square in re.findall(rf"([·/]?)\s?({NUMBER})(²?)", left):
            factor = value(number) ** (2 if square else 1)
            result = result / factor if operator == "/" else result * factor
            found.add(value(number))
        found |= {
            value(number) for number in re.findall(NUMBER, right) if any(rounds_to(result / x, number) for x in SCALES)
        }
    return found


def unaccounted(prose, evidence=""):
    """Return the typed numbers with a unit in markdown texts that neither evidence nor the paragraph accounts for."""
    claims, _ = ledger.load_table()
    evidence = re.sub(r"(?<=\d)[,_](?=\d{3})", "", evidence)
    blocks = [block for text in prose for block in paragraphs(text)]
    evidence += "\n".join(block for block in blocks if RECORD.match(block))
    known = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", evidence)}
    missing = []
    for block in blocks:
        if "{cite}" in block or RECORD.match(block):
            continue
        named = " ".join(claims[name] for name in claims if re.search(rf"\b{name[:3]}", block))
        here = known | computed_here(block) | {value(number) for number in re.findall(NUMBER, named)}
        for match in TYPED.finditer(block):
            for number in filter(None, (match["low"], match["number"])):
                n = value(number)
                as_share = n / 100 in here and match["unit"] == "%"
                if n not in here and not as_share:
                    missing.append(
                        f"{number} {match['unit']} in: …{block[max(0, match.start() - 60) : match.end() + 40]}…"
                    )
    return missing


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_numbers_of_a_chapter_are_accounted_for(path):
    missing = unaccounted(*read_chapter(path))
    assert not missing, "compute them and glue them in, or cite:\n" + "\n".join(missing)


@pytest.mark.parametrize("path", [page for page in PAGES if page.name not in RENDERED], ids=lambda path: path.stem)
def test_numbers_of_a_page_are_accounted_for(path):
    text = path.read_text()
    if path.name == "tuning_log.md":  # all of it is a record, of which the beginning names machine and date
        assert RECORD.match(text.partition("\n## ")[0])
    else:
        assert not unaccounted([text])


@pytest.mark.parametrize(
    "prose, evidence, found",
    [
        ("The kernel takes 1.23 ms.", "", ["1.23 ms"]),
        ("The kernel takes 1.23 ms.", "ms = 1.23", []),
        ("The kernel takes 1.23 ms.", "ms = 11.23", ["1.23 ms"]),
        ("It is 3 to 5 % faster.", "gain = 0.05", ["3 %"]),
        ("It takes 1.23 ms {cite}`somebody2020`.", "", []),
        ("It takes 1.23 ms.\n\nA paper {cite}`somebody2020`.", "", ["1.23 ms"]),
        ("- It takes 1.23 ms.\n- A paper {cite}`somebody2020`.", "", ["1.23 ms"]),
        ("It takes {glue:text}`ch01_ms` and 17 registers.", "", ["17 registers"]),
        ("It has 3 · 32 · 128 = 12288 elements.", "", []),
        ("It has 3 · 32 · 128 = 12289 elements and 7 numbers.", "", ["12289 elements", "7 numbers"]),
        ("It has 50,000² · 32 · 2 bytes = 160 GB.", "", []),
        ("The article says over 90 % (C13).", "", []),
        ("The article says over 91 % (C13).", "", ["91 %"]),
        ("On an H200 on 2026-11-30 it took 1.23 ms.", "", []),
        ("| a | 1.23 ms |\n\n(One H200, 2026-11-30.)", "", []),
        ("| a | 1.23 ms |\n\n(One H200.)", "", ["1.23 ms"]),
    ],
)
def test_a_typed_number_is_noticed(prose, evidence, found):
    missing = [line.partition(" in: ")[0] for line in unaccounted([prose], evidence)]
    assert missing == found


def test_a_number_planted_in_a_chapter_is_noticed():
    prose, evidence = read_chapter(CHAPTERS[0])
    (line,) = unaccounted([*prose, "A step of it takes 31.7 ms."], evidence)
    assert line.startswith("31.7 ms")


WORDS = ROOT / "tests" / "words.txt"


def docstrings(path):
    """Return the docstrings of a module."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


@functools.cache
def texts():
    """Return {path: prose} of chapters, pages and docstrings."""
    modules = [path for folder in ("flashattn", "book/_ext", "tests") for path in sorted((ROOT / folder).glob("*.py"))]
    found = {path: "\n\n".join(read_chapter(path)[0]) for path in CHAPTERS}
    return found | {path: path.read_text() for path in PAGES} | {path: docstrings(path) for path in modules}


def words(text):
    """Return the words of a text, without code, formulas, links, references and names with a dot, slash or underscore."""
    code = r"```.*?```|``.*?``|\{[\w:]+\}`[^`<]*(?:<[^`]*>)?`|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|https?://\S+|<[^>]+>"
    text = re.sub(code, " ", text, flags=re.S)
    return set(re.findall(r"(?<![\w./\\_-])[A-Za-z][a-z]+(?:'[a-z]+)?(?![\w/\\_]|\.\w)", text))


@functools.cache
def dictionary():
    """Return the checker with its own English words and those of tests/words.txt."""
    checker = SpellChecker(distance=1)
    checker.word_frequency.load_words(WORDS.read_text().split())
    return checker


def misspelled(text):
    """Return the words of a text that the dictionary does not have."""
    return sorted(word for word in words(text) if not dictionary().known([word.removesuffix("'s")]))


def test_words_are_words():
    wrong = {path.relative_to(ROOT).as_posix(): misspelled(text) for path, text in texts().items()}
    wrong = {name: found for name, found in wrong.items() if found}
    assert not wrong, f"misspelled, or to be added to tests/words.txt: {wrong}"


def test_a_misspelled_word_is_noticed():
    assert misspelled("The kernel's `lenght` has no bandwith, which $alhpa$ explains.") == ["bandwith"]


def test_own_words_are_sorted_and_needed():
    own = WORDS.read_text().split()
    assert own == sorted(set(own))
    used = {word.removesuffix("'s").lower() for text in texts().values() for word in words(text)}
    assert set(own) <= used, f"no text has {set(own) - used}"
    plain = SpellChecker(distance=1)
    assert not [word for word in own if plain.known([word])], "the dictionary has them already"
