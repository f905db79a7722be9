"""explore(): the one interactive figure of the book. With a kernel it is ipywidgets, on a page it is plain HTML.

On a page the frames are drawn beforehand and travel in the figure: native range and select inputs pick one, and the few
lines of ``explorer.js`` put it in place. There is no widget manager, no require.js and no request. A reader without
scripts sees the first frame. The frames are stored as numbers of distinct pieces, compressed: most pieces are the
same in all of them.
"""

import base64
import hashlib
import html
import itertools
import json
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .figures import STYLE, Picture

SCRIPT = (Path(__file__).parent / "explorer.js").read_text()
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Control:
    """One thing that the reader can set. Numbers make a slider, names a list to choose from.

    Args:
        values: two or more values, all numbers or all strings, in the order of the slider.
        label: what the values are, as the reader sees it.
        unit: unit of the values, or empty.
        start: the value of the first frame. Default: the first value.

    Raises:
        TypeError: values are neither all numbers nor all strings.
        ValueError: fewer than two values, one twice, no label, or a start that is not among the values.
    """

    values: tuple
    label: str
    unit: str = ""
    start: object = None

    def __post_init__(self):
        values = tuple(self.values)
        object.__setattr__(self, "values", values)
        if len(values) < 2:
            raise ValueError(f"`values` of control {self.label!r} must have two values or more, got {list(values)}")
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        if not numbers and not all(isinstance(value, str) for value in values):
            raise TypeError(
                f"`values` of control {self.label!r} must be all numbers or all strings, got {list(values)}"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"`values` of control {self.label!r} must differ, got {list(values)}")
        if not isinstance(self.label, str) or not self.label.strip():
            raise ValueError(f"`label` must say what the values are, got {self.label!r}")
        if self.start is None:
            object.__setattr__(self, "start", values[0])
        if self.start not in values:
            raise ValueError(f"`start` of control {self.label!r} must be one of {list(values)}, got {self.start!r}")

    @property
    def is_range(self):
        """Whether the control is a slider."""
        return not isinstance(self.values[0], str)

    def text(self, value):
        """Return a value as the reader sees it, with its unit."""
        return f"{value} {self.unit}".strip()


class Explorer:
    """Show a figure with controls: a widget where a kernel runs, HTML everywhere else. :func:`explore` makes it.

    Args:
        draw: the function that draws one frame.
        controls: {name of its argument: :class:`Control`}.
    """

    def __init__(self, draw, controls):
        self.draw, self.controls = draw, controls
        self._html = None
        self._widget = None
        self._id = None

    def frame(self, **values):
        """Draw one frame. Return (HTML, sentence); raise TypeError if ``draw`` returns something else."""
        with matplotlib.rc_context(STYLE):
            drawn = self.draw(**values)
            if not (isinstance(drawn, tuple) and len(drawn) == 2 and isinstance(drawn[1], str) and drawn[1].strip()):
                raise TypeError(f"`draw` must return (figure or HTML, sentence), got {_name(drawn)} for {values}")
            shown, sentence = drawn
            if isinstance(shown, Figure):
                if "matplotlib.pyplot" in sys.modules:  # a figure made there would be shown a second time
                    sys.modules["matplotlib.pyplot"].close(shown)
                shown = Picture(shown, sentence, prefix=self._prefix()).svg
        if not isinstance(shown, str):
            raise TypeError(
                f"`draw` must return a matplotlib Figure or a string of HTML, got {_name(shown)} for {values}"
            )
        return shown, sentence

    def settings(self):
        """Return the values of every frame in order: the last control runs fastest."""
        names = list(self.controls)
        every = itertools.product(*(control.values for control in self.controls.values()))
        return [dict(zip(names, values, strict=True)) for values in every]

    def html(self):
        """Return the figure as HTML with all its frames, drawn at the first call."""
        if self._html is None:
            settings = self.settings()
            frames = [self.frame(**values) for values in settings]
            first = settings.index({name: control.start for name, control in self.controls.items()})
            self._html = _page(self._prefix(), self.controls, frames, first)
        return self._html

    def widget(self):
        """Return the figure as one ipywidgets box, the same at every call; raise ImportError without ipywidgets."""
        if self._widget is None:
            self._widget = _widget(self)
        return self._widget

    def _prefix(self):
        """Return the id of this explorer on its page. The name of the function keeps two notebooks' ids apart."""
        if self._id is None:
            name = f"{getattr(self.draw, '__qualname__', '')} {list(self.controls.values())}"
            self._id = f"x{hashlib.sha256(name.encode()).hexdigest()[:6]}-{next(_numbers)}"
        return self._id

    def _repr_html_(self):
        return self.html()

    def _repr_mimebundle_(self, include=None, exclude=None):
        """Offer both forms: a front end with a kernel prefers the widget, a page takes the HTML."""
        bundle = {"text/html": self.html(), "text/plain": repr(self)}
        try:
            model = self.widget().model_id
        except ImportError:
            return bundle
        view = {"version_major": 2, "version_minor": 0, "model_id": model}
        return bundle | {"application/vnd.jupyter.widget-view+json": view}

    def __repr__(self):
        labels = ", ".join(control.label for control in self.controls.values())
        return f"Explorer({getattr(self.draw, '__name__', 'draw')}: {labels})"


def explore(draw, **controls):
    """Make a figure that answers when its reader moves a control, with a kernel and without one.

    Args:
        draw: called with one value for each control, by name. Returns (shown, sentence): a matplotlib Figure or a
            string of HTML, and what this frame shows in one sentence, which is its text alternative and is read out
            when the frame changes. It is called once for every combination of values, so it should take milliseconds.
        controls: a :class:`Control` for each argument of ``draw``, in the order in which they stand above the figure.

    Returns:
        An :class:`Explorer`; the last line of a cell shows it.

    Raises:
        TypeError: ``draw`` cannot be called, or returns something else; a control is no Control.
        ValueError: there is no control.

    Example::

        def draw(n, kind):
            return f"<p>{n} {kind}</p>", f"There are {n} {kind}."

        explore(draw, n=Control([1, 2, 3], "how many"), kind=Control(["apples", "pears"], "fruit"))
    """
    if not callable(draw):
        raise TypeError(f"`draw` must be a function, got {_name(draw)}")
    if not controls:
        raise ValueError("`controls` must name one control or more, such as n=Control([1, 2, 3], 'how many')")
    for name, control in controls.items():
        if not isinstance(control, Control):
            raise TypeError(f"control `{name}` must be a Control(values, label), got {_name(control)}")
    return Explorer(draw, controls)


def _name(value):
    inside = f" of {', '.join(type(item).__name__ for item in value)}" if isinstance(value, tuple) else ""
    return type(value).__name__ + inside


def _page(prefix, controls, frames, first):
    """Return the HTML of a figure. frames: (HTML, sentence) each; first: the number of the one shown at the start."""
    rows = "".join(_control_html(f"{prefix}-{name}", name, control) for name, control in controls.items())
    shown, sentence = frames[first]
    return (
        f'<figure class="flashattn-explorer" id="{prefix}" data-frames="{len(frames)}" style="margin:1em 0">\n'
        f'<div class="flashattn-controls" role="group" aria-label="Settings of this figure" hidden>{rows}</div>\n'
        f'<div data-frame="{first}">{shown}</div>\n'
        f'<figcaption aria-live="polite">{html.escape(sentence)}</figcaption>\n'
        f'<script type="text/plain" data-packed>{pack(frames)}</script>\n'
        f'<script>\n{SCRIPT}window.flashattnExplorer("{prefix}");\n</script>\n</figure>'
    )


def _control_html(id_, name, control):
    label = f'<label for="{id_}">{html.escape(control.label)}</label>'
    texts, start = [control.text(value) for value in control.values], control.values.index(control.start)
    if control.is_range:
        text = html.escape(texts[start])
        field = (
            f'<input type="range" id="{id_}" data-control="{name}" min="0" max="{len(texts) - 1}" step="1" '
            f'value="{start}" autocomplete="off" aria-valuetext="{text}" '
            f'data-values="{html.escape(json.dumps(texts, ensure_ascii=False))}">'
            # The input's own value text is read out, so this one is for the eye only.
            f'<output for="{id_}" aria-hidden="true">{text}</output>'
        )
    else:
        options = "".join(
            f"<option{' selected' if i == start else ''}>{html.escape(text)}</option>" for i, text in enumerate(texts)
        )
        field = f'<select id="{id_}" data-control="{name}" autocomplete="off">{options}</select>'
    return f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:0.2em 0.7em">{label} {field}</div>'


def pack(frames):
    """Return frames, (HTML, sentence) each, as base64 of compressed JSON: distinct pieces, their numbers by frame."""
    numbers, packed = {}, []
    for shown, sentence in frames:
        # A piece is a line or an element of one: what changes between two frames is seldom more than a few of them.
        pieces = [sentence, *re.split(r"(?<=>)(?=<)|(?<=\n)", shown)]
        packed.append([numbers.setdefault(piece, len(numbers)) for piece in pieces])
    text = json.dumps({"pieces": list(numbers), "frames": packed}, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(packed):
    """Return the frames of :func:`pack` again, (HTML, sentence) each, as a browser would."""
    stored = json.loads(zlib.decompress(base64.b64decode(packed)))
    frames = [[stored["pieces"][i] for i in numbers] for numbers in stored["frames"]]
    return [("".join(pieces[1:]), pieces[0]) for pieces in frames]


def _widget(explorer):
    """Build the live form. It uses only what ipywidgets 7 and 8 share."""
    import ipywidgets

    fields, style = {}, {"description_width": "initial"}
    for name, control in explorer.controls.items():
        kind = ipywidgets.SelectionSlider if control.is_range else ipywidgets.Dropdown
        options = [(control.text(value), value) for value in control.values]
        fields[name] = kind(options=options, value=control.start, description=control.label, style=style)
        fields[name].layout.width = "min(100%, 32em)"
    view = ipywidgets.HTML()

    def show(change=None):
        shown, sentence = explorer.frame(**{name: field.value for name, field in fields.items()})
        view.value = f'{shown}<p role="status">{html.escape(sentence)}</p>'

    for field in fields.values():
        field.observe(show, names="value")
    show()
    return ipywidgets.VBox([*fields.values(), view])
