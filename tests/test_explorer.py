"""explore(): its HTML, its size, its live form, and its errors."""

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

from flashattn import explorer  # noqa: E402
from flashattn.explorer import Control, explore  # noqa: E402

VOID = {"input"}


class Tree(HTMLParser):
    """Elements in order, (tag, attributes); fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def find(self, tag, **wanted):
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted.items())]


def words(n, kind):
    return f"<p><b>{n}</b><i>{kind}</i>\n & more</p>", f'There are {n} "{kind}" & more.'


def plot(slope, height):
    figure = Figure(layout="none")  # laying out 400 figures takes most of a minute
    axes = figure.subplots()
    xs = [i / 10 for i in range(40)]
    axes.plot(xs, [slope * x**2 for x in xs], marker="o", label=f"slope {slope}")
    axes.axhline(height)
    axes.set(xlabel="time (s)", ylabel="height (m)", xlim=(0, 4), ylim=(0, 300))
    axes.legend()
    return figure, f"A parabola of slope {slope} and a line at {height} m."


@pytest.fixture
def by_words():
    return explore(
        words, n=Control([1, 2, 5], "how <many>", "pieces", start=2), kind=Control(["apples", "pears"], "fruit")
    )


class TestHtml:
    def test_controls_are_native_labelled_and_say_their_value(self, by_words):
        tree = Tree(by_words.html())
        (figure,) = tree.find("figure")
        assert figure["class"] == "flashattn-explorer" and figure["data-frames"] == "6"
        (slider,) = tree.find("input", type="range")
        assert slider["data-control"] == "n"
        assert (slider["min"], slider["max"], slider["step"], slider["value"]) == ("0", "2", "1", "1")
        assert slider["aria-valuetext"] == "2 pieces" and "5 pieces" in slider["data-values"]
        (select,) = tree.find("select")
        assert select["data-control"] == "kind" and len(tree.find("option")) == 2
        assert {label["for"] for label in tree.find("label")} == {slider["id"], select["id"]}
        assert "how &lt;many&gt;" in by_words.html()

    def test_first_frame_and_its_sentence_stand_in_the_page_without_scripts(self, by_words):
        text = re.sub(r"<script.*?</script>", "", by_words.html(), flags=re.S)
        shown, sentence = words(2, "apples")
        assert f'<div data-frame="2">{shown}</div>' in text
        assert f'<figcaption aria-live="polite">{html.escape(sentence)}</figcaption>' in text
        (controls,) = [a for _, a in Tree(text).elements if a.get("class") == "flashattn-controls"]
        assert "hidden" in controls, "controls that do nothing without scripts must not show"

    def test_every_frame_comes_back_as_drawn(self, by_words):
        packed = re.search(r"data-packed>([^<]+)<", by_words.html()).group(1)
        assert explorer.unpack(packed) == [words(**values) for values in by_words.settings()]
        assert by_words.settings()[:3] == [dict(n=1, kind="apples"), dict(n=1, kind="pears"), dict(n=2, kind="apples")]

    def test_nothing_is_fetched(self, by_words):
        tree = Tree(by_words.html())
        assert not [a for _, a in tree.elements if {"src", "href", "action"} & set(a)]
        assert not re.search(r"require\(|import\(|import |fetch\(|https?:", explorer.SCRIPT)

    def test_figures_are_themeable_and_share_ids(self):
        shown = explore(plot, slope=Control([1, 2], "slope"), height=Control([10, 20], "height", "m"))
        text = shown.html()
        (svg,) = Tree(text).find("svg")
        assert svg["role"] == "img" and svg["aria-label"] == "A parabola of slope 1 and a line at 10 m."
        assert "currentColor" in text and "<style" not in text
        ids = {
            i
            for frame, _ in explorer.unpack(re.search(r"data-packed>([^<]+)<", text).group(1))
            for i in re.findall(r' id="([^"]+)"', frame)
        }
        assert ids and all(i.startswith(shown._prefix()) for i in ids)

    def test_two_of_a_kind_have_different_ids(self):
        controls = dict(n=Control([1, 2], "n"), kind=Control(["a", "b"], "kind"))
        ids = [[a["id"] for _, a in Tree(explore(words, **controls).html()).elements if "id" in a] for _ in range(2)]
        assert len(set(ids[0] + ids[1])) == len(ids[0] + ids[1]) == 6

    def test_400_settings_add_less_than_300_kb(self):
        shown = explore(plot, slope=Control(range(1, 21), "slope"), height=Control(range(10, 210, 10), "height", "m"))
        assert 'data-frames="400"' in shown.html()
        assert len(shown.html().encode()) < 300_000

    def test_bundle_has_both_forms(self, by_words):
        bundle = by_words._repr_mimebundle_()
        assert bundle["text/html"] == by_words.html() and "how <many>" in bundle["text/plain"]
        view = bundle["application/vnd.jupyter.widget-view+json"]
        assert view["version_major"] == 2 and view["model_id"] == by_words.widget().model_id


class TestLive:
    def test_a_change_of_value_changes_frame_and_sentence(self, by_words):
        *fields, view = by_words.widget().children
        assert [type(field).__name__ for field in fields] == ["SelectionSlider", "Dropdown"]
        assert [field.description for field in fields] == ["how <many>", "fruit"]
        assert words(2, "apples")[0] in view.value
        fields[0].value = 5
        fields[1].value = "pears"
        shown, sentence = words(5, "pears")
        assert shown in view.value and html.escape(sentence) in view.value
        assert fields[0].options[2][0] == "5 pieces"

    def test_uses_nothing_that_ipywidgets_7_lacks(self):
        """The names and arguments of ipywidgets 7.7 that the live form may use, and no others."""
        source = Path(explorer.__file__).read_text()
        assert set(re.findall(r"ipywidgets\.(\w+)", source)) == {"SelectionSlider", "Dropdown", "HTML", "VBox"}

    def test_works_without_ipywidgets(self):
        code = (
            "import sys; sys.modules['ipywidgets'] = None\n"
            "from flashattn.explorer import Control, explore\n"
            "shown = explore(lambda n: (f'<p>{n}</p>', f'It is {n}.'), n=Control([1, 2], 'n'))\n"
            "print(sorted(shown._repr_mimebundle_()))\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "['text/html', 'text/plain']"


class TestErrors:
    @pytest.mark.parametrize(
        "values, kwargs, error, message",
        [
            ([], {}, ValueError, r"`values` of control 'n' must have two values or more, got \[\]"),
            ([3], {}, ValueError, "two values or more"),
            ([1, "a"], {}, TypeError, r"`values` of control 'n' must be all numbers or all strings, got \[1, 'a'\]"),
            ([True, False], {}, TypeError, "all numbers or all strings"),
            ([1, 2, 1], {}, ValueError, r"`values` of control 'n' must differ, got \[1, 2, 1\]"),
            ([1, 2], {"start": 3}, ValueError, r"`start` of control 'n' must be one of \[1, 2\], got 3"),
            ([1, 2], {"label": " "}, ValueError, "`label` must say what the values are, got ' '"),
        ],
    )
    def test_control(self, values, kwargs, error, message):
        with pytest.raises(error, match=message):
            Control(values, **({"label": "n"} | kwargs))

    def test_explore(self):
        with pytest.raises(TypeError, match="`draw` must be a function, got str"):
            explore("draw", n=Control([1, 2], "n"))
        with pytest.raises(ValueError, match="`controls` must name one control or more"):
            explore(words)
        with pytest.raises(TypeError, match="control `n` must be a Control.* got list"):
            explore(words, n=[1, 2])

    @pytest.mark.parametrize(
        "returned, message",
        [
            ("<p>", r"`draw` must return \(figure or HTML, sentence\), got str for {'n': 1}"),
            (None, "got NoneType"),
            (("<p>", ""), r"got tuple of str, str"),
            (("<p>", None), r"got tuple of str, NoneType"),
            ((7, "Seven."), "`draw` must return a matplotlib Figure or a string of HTML, got int"),
        ],
    )
    def test_draw_that_returns_something_else(self, returned, message):
        with pytest.raises(TypeError, match=message):
            explore(lambda n: returned, n=Control([1, 2], "n")).html()
