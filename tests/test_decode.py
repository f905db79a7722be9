"""flash_decode: the newest tokens of sequences whose keys lie in pages, held to the error budget of flashattn.testing."""

import itertools
import json
import math
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from processes import python

from flashattn import attention_reference, decode, flash_attention, flash_decode
from flashattn.testing import DTYPES, FACTOR, max_error

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, in the interpreter
param, parametrize, gpu = pytest.param, pytest.mark.parametrize, pytest.mark.gpu
COMPILE = str(Path(__file__).with_name("compile_decode.py"))
GARBAGE = (-1, 2**31 - 1, -(2**31), 10**6)


class Decode(NamedTuple):
    """A call: sequences of these lengths, and what differs from the defaults. layout is that of the stores."""

    lengths: tuple
    n_tokens: int = 1
    dtype: str = "bf16"
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    page_size: int = 16
    layout: str = "heads first"
    family: str = "gaussian"
    options: dict = {}  # noqa: RUF012
    n_splits: int | None = None

    @property
    def id(self):
        differs = [f"{k}={v}" for k, v in self._asdict().items() if v != Decode((0,))._asdict()[k] and k != "lengths"]
        return "-".join(["+".join(map(str, self.lengths)), *differs])


CASES = [
    Decode((0, 1, 15, 16, 17, 130)),
    Decode((130, 257), page_size=64, dtype="fp16", head_dim=64, family="low"),
    Decode((130, 300), page_size=256, dtype="fp16", layout="rows first", family="large"),
    Decode((130, 257), page_size=32, dtype="fp32", head_dim=24, head_dim_v=40, layout="columns"),
    Decode((5, 3, 0, 100), n_tokens=5, page_size=32, layout="rows first"),
    Decode((90, 16), n_tokens=16, heads=6, page_size=128, dtype="fp16"),  # 48 rows: two blocks of them
    Decode((130, 3), n_tokens=3, heads=8, heads_kv=1, dtype="fp32", options=dict(softcap=2.0, scale=0.7)),
    Decode((200, 70), options=dict(window=(66, 0)), heads=3, heads_kv=3, dtype="fp16", family="low"),
    Decode((200, 9), n_tokens=4, options=dict(window=(70, None), scale=-0.3), dtype="fp32"),
    Decode((75, 128), options=dict(window=(0, 3)), n_tokens=2, page_size=64),
    Decode((300, 64), options=dict(scale=0.0), dtype="fp32", head_dim=1, head_dim_v=3),
    *(
        Decode((257, 0, 64), n_tokens=2, heads=2, heads_kv=1, dtype="fp32", family="large", n_splits=n)
        for n in (1, 2, 5, 11)
    ),
    Decode((257, 90), n_tokens=3, dtype="fp16", options=dict(window=(100, 0)), n_splits=3),
]
LARGE = [  # on a GPU
    Decode((1, 8192, 5000), dtype=dtype, heads=32, heads_kv=8, head_dim=128, page_size=page_size, n_tokens=n)
    for dtype, page_size, n in itertools.product(("fp16", "bf16"), (16, 64, 256), (1, 4, 16))
] + [
    Decode((70000,), heads=32, heads_kv=8, head_dim=128, page_size=64),
    Decode((70000,), heads=32, heads_kv=8, head_dim=128, page_size=64, options=dict(window=(4095, 0)), n_tokens=7),
    *(Decode((700,) * 300, heads=16, heads_kv=2, head_dim=d, layout="rows first") for d in (64, 96, 256)),
    Decode((4097, 3), dtype="fp32", head_dim=128, page_size=32, n_tokens=3, options=dict(softcap=30.0)),
    Decode((4097, 3), dtype="fp32", head_dim=256, page_size=64),
]


class Inputs(NamedTuple):
    q: torch.Tensor
    keys: list  # of each sequence, (heads_kv, length, head_dim)
    values: list
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    seqlens: torch.Tensor

    @property
    def arguments(self):
        return self.q, *self[3:]


def store_of(sequences, table, n_pages, page_size, layout):
    """Return a store of pages with the rows of (heads_kv, length, head_dim) sequences, and NaN everywhere else."""
    heads_kv, _, head_dim = sequences[0].shape
    sizes = dict(p=n_pages, h=heads_kv, n=page_size, d=head_dim)
    order = {"heads first": "phnd", "rows first": "pnhd", "columns": "phdn"}[layout]
    dtype = sequences[0].dtype
    fill = torch.full([sizes[x] for x in order], math.nan, dtype=torch.float32, device=table.device).to(dtype)
    store = fill.permute(*(order.index(x) for x in "phnd"))
    for b, x in enumerate(sequences):
        for i, rows in enumerate(x.split(page_size, dim=1)):
            store[table[b, i], :, : rows.shape[1]] = rows
    return store


def make(case, device="cpu", seed=0):
    """Draw a case: pages in random order, two more columns in the table than any needs, garbage where none is needed."""
    generator = torch.Generator().manual_seed(seed)
    dtype, d, d_v = DTYPES[case.dtype], case.head_dim, case.head_dim_v or case.head_dim

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    shift = math.sqrt({"gaussian": 0, "low": 8, "large": 100}[case.family] / math.sqrt(d))
    spread, sign = (1.0, 1) if case.family == "gaussian" else (0.5, -1 if case.family == "low" else 1)
    q = (draw(len(case.lengths), case.n_tokens, case.heads, d) * spread + shift).to(dtype).transpose(1, 2)
    keys = [(draw(case.heads_kv, n, d) * spread + sign * shift).to(dtype) for n in case.lengths]
    values = [draw(case.heads_kv, n, d_v).to(dtype) for n in case.lengths]
    needed = [-(-n // case.page_size) for n in case.lengths]
    n_pages = sum(needed) + 2
    pages = iter(torch.randperm(n_pages, generator=generator).tolist())
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(needed), max(needed) + 2)[:, : max(needed) + 2]
    for b, n in enumerate(needed):
        table[b, :n] = torch.tensor(list(itertools.islice(pages, n)), dtype=torch.int32)
    table = table.to(device)
    k_pages = store_of(keys, table, n_pages, case.page_size, case.layout)
    v_pages = store_of(values, table, n_pages, case.page_size, "heads first")
    seqlens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return Inputs(q, keys, values, k_pages, v_pages, table, seqlens)


def expected(inputs, dtype, **options):
    """Return (out, lse) of eager attention on each sequence, in a dtype."""
    results = [
        attention_reference(q[None].to(dtype), k[None].to(dtype), v[None].to(dtype), causal=True, **options)
        for q, k, v in zip(inputs.q, inputs.keys, inputs.values, strict=True)
    ]
    return [torch.cat(x) for x in zip(*results, strict=True)]


def assert_within(actual, inputs, eager_draws=(), **options):
    """Hold out and lse to the budget: FACTOR times the error of eager attention in the dtype, plus one rounding."""
    truths = expected(inputs, torch.float64, **options)
    budgets = [0.0, 0.0]
    for draws in (inputs, *eager_draws):
        right, own = (expected(draws, dtype, **options) for dtype in (torch.float64, draws.q.dtype))
        if not own[0].isfinite().all():
            own = [x.to(y.dtype) for x, y in zip(expected(draws, torch.float32, **options), own, strict=True)]
        for i, name in enumerate(("out", "lse")):
            size = right[i].masked_fill(right[i].isinf(), 0).abs().max().item()
            budget = FACTOR[name] * max_error(own[i], right[i]) + torch.finfo(own[i].dtype).eps * size
            budgets[i] = max(budgets[i], budget)
    for name, x, truth, budget in zip(("out", "lse"), actual, truths, budgets, strict=True):
        assert x.shape == truth.shape
        assert max_error(x, truth) <= budget, (name, max_error(x, truth) / budget)
    assert not actual[0][truths[1] == -math.inf].count_nonzero()


def run(case, inputs):
    """Call flash_decode, or, with a number of splits that is not for users to choose, the launcher beneath it."""
    if case.n_splits is None:
        return flash_decode(*inputs.arguments, return_lse=True, **case.options)
    from flashattn.decode_kernels import attn_decode

    window = case.options.get("window")
    options = dict(softcap=None, scale=1 / math.sqrt(case.head_dim)) | case.options
    options |= dict(window_left=window and window[0], n_splits=case.n_splits)
    options.pop("window", None)
    return attn_decode(*inputs.arguments, None, None, **options)


@parametrize("case", [*CASES, *(param(case, marks=gpu) for case in LARGE)], ids=lambda case: case.id)
def test_within_budget(case, device):
    inputs = make(case, device)
    actual = run(case, inputs)
    assert actual[0].dtype == inputs.q.dtype and actual[1].dtype == torch.float32
    others = [make(case, device, seed) for seed in (1, 2)] if sum(case.lengths) < 1000 else []
    assert_within(actual, inputs, others, **case.options)
    if device == "cuda":
        assert all(map(torch.equal, actual, run(case, inputs)))


@gpu
@parametrize("n_splits", [1, 2, 3, 16, 100])
def test_every_number_of_splits(n_splits, device):
    case = Decode((3000, 0, 129, 1), n_tokens=2, heads=8, head_dim=128, page_size=64, dtype="fp16", n_splits=n_splits)
    inputs = make(case, device)
    assert_within(run(case, inputs), inputs)


def test_it_is_flash_attention_on_the_same_keys(device):
    case = Decode((150, 150), n_tokens=3, dtype="fp32", options=dict(window=(100, 7), softcap=3.0))
    inputs = make(case, device)
    k, v = torch.stack(inputs.keys), torch.stack(inputs.values)
    out, lse = flash_attention(inputs.q, k, v, causal=True, return_lse=True, **case.options)
    actual = run(case, inputs)
    torch.testing.assert_close(actual, (out, lse), rtol=1e-5, atol=1e-5)
    assert actual[0].stride() == out.stride()


def test_a_number_alone_is_returned_without_lse(device):
    inputs = make(Decode((20,)), device)
    out, _ = flash_decode(*inputs.arguments, return_lse=True)
    assert torch.equal(flash_decode(*inputs.arguments), out)


def test_what_is_remembered_of_a_call_fits_no_other(device):
    """The same numbers in other strides, at other addresses, in wider tables: each is a kind of call of its own."""
    case = Decode((40, 33), n_tokens=2, dtype="fp16", head_dim=16)
    q, k, v, table, lengths = make(case, device).arguments
    expected = flash_decode(q, k, v, table, lengths)

    def moved(x):  # one element further on
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)

    def spread(x):  # every second column
        return x.repeat_interleave(2, dim=-1)[..., ::2]

    for change in (torch.Tensor.contiguous, moved, spread):
        for arguments in ((change(q), k, v), (q, change(k), v), (q, k, change(v))):
            assert torch.equal(flash_decode(*arguments, table, lengths), expected)
    for tables in (spread(table), moved(table)):
        assert torch.equal(flash_decode(q, k, v, tables, moved(lengths)), expected)
    wide = flash_decode(q, k, v, table.repeat(1, 9), lengths)  # which may split otherwise
    torch.testing.assert_close(wide, expected, rtol=2e-3, atol=2e-3)
    half = flash_decode(q, k, v, table, lengths, scale=0.125)
    assert not torch.equal(half, expected)
    assert torch.equal(flash_decode(q, k, v, table, lengths, scale=0.25), expected)  # 1 / sqrt(16), said aloud
    for _ in range(2):  # the sign goes into q, which must not be remembered
        assert torch.equal(flash_decode(-q, k, v, table, lengths, scale=-0.25), expected)


@parametrize("n_splits", [1, 3])
def test_nan_in_a_visible_key_shows_and_in_others_does_not(n_splits, device):
    """NaN stands in every tail and in every page that no sequence has, in all tests here; now in a key too."""
    case = Decode((150, 100), dtype="fp32", options=dict(window=(40, 0)), n_splits=n_splits)
    for name, position, shows in (("k", 130, True), ("v", 109, True), ("k", 108, False), ("v", 3, False)):
        inputs = make(case, device)
        store = inputs.k_pages if name == "k" else inputs.v_pages
        store[inputs.page_table[0, position // 16], 1, position % 16] = math.nan
        out = run(case, inputs)[0]
        assert out[0, 2:].isnan().any(-1).all().item() is shows  # the query heads of key head 1
        assert out[0, :2].isfinite().all() and out[1].isfinite().all()


def test_pages_before_the_window_may_be_gone(device):
    """A cache that has freed what no token sees any more has no pages to name there."""
    case = Decode((300,), n_tokens=2, dtype="fp32", options=dict(window=(40, 0)))
    inputs = make(case, device)
    kept = run(case, inputs)
    first_visible = 300 - 2 - 40
    inputs.page_table[:, : first_visible // 16] = 2**31 - 1
    assert all(map(torch.equal, kept, run(case, inputs)))


@parametrize("per_head", [False, True], ids=["one scale", "one a head"])
@parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_fp8_pages(dtype, per_head, device):
    """Beside eager attention on the very numbers that the pages hold, what is left is the error of the products."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    case = Decode((130, 0, 47), n_tokens=2, dtype=dtype, page_size=32)
    inputs = make(case, device)
    shape = (2,) if per_head else ()
    k_scale, v_scale = (
        torch.linspace(a, 3 * a, 2, device=device)[: 2 if per_head else 1].reshape(shape) for a in (0.01, 0.02)
    )
    stores, dense = [], []
    for name, scale in (("keys", k_scale), ("values", v_scale)):
        by_head = scale.expand(2)[:, None, None]
        rounded = [(x.float() / by_head).to(decode.E4M3) for x in getattr(inputs, name)]
        stores.append(store_of(rounded, inputs.page_table, len(inputs.k_pages), 32, "rows first"))
        dense.append([x.double() * by_head.double() for x in rounded])
    pages = inputs._replace(k_pages=stores[0], v_pages=stores[1], keys=dense[0], values=dense[1])
    actual = flash_decode(*pages.arguments, k_scale=k_scale, v_scale=v_scale, return_lse=True)
    assert_within(actual, pages)
    without = flash_decode(*pages.arguments)
    ones = torch.ones((), device=device)
    assert torch.equal(without, flash_decode(*pages.arguments, k_scale=ones, v_scale=ones))
    zero = flash_decode(*pages.arguments, k_scale=ones * 0, v_scale=v_scale, return_lse=True)
    assert_within(zero, pages, scale=0.0)


def test_choice_of_splits():
    """Enough programs for the device, no more parts than there are tiles, one part where all are busy anyway."""
    from flashattn.splits import MOST_SPLITS, choose_splits

    assert choose_splits(4096, 1000, 396) == choose_splits(390, 1000, 396) == 1  # nearly all waves are full
    assert choose_splits(8, 1, 396) == choose_splits(8, 0, 396) == 1
    few = choose_splits(8, 1024, 396)
    assert 0.85 * 396 <= 8 * few <= 396
    assert 0.9 * MOST_SPLITS <= choose_splits(1, 10**6, 10**4) <= MOST_SPLITS
    for programs, tiles in itertools.product((1, 7, 64, 512, 5000), (1, 3, 16, 128, 1024)):
        assert 1 <= choose_splits(programs, tiles, 396) <= tiles


def test_parts_cover_all_keys_once():
    """``split_range`` in Python: whole tiles, whose numbers differ by one at most."""
    from flashattn.decode_kernels import split_range

    class Plain:  # what the function takes from triton.language, on Python's integers
        cdiv = staticmethod(lambda a, b: -(-a // b))
        minimum, maximum = min, max

    plain = types.FunctionType(split_range.fn.__code__, dict(tl=Plain))
    for begin, end, n in itertools.product((0, 64), (0, 1, 64, 1000), (1, 3, 7)):
        parts = [plain(begin, end, i, n, 64) for i in range(n)]
        covered = [x for low, high in parts for x in range(low, high)]
        assert covered == list(range(begin, end))
        tiles = [-(-(high - low) // 64) for low, high in parts if low < high]
        assert (
            len(tiles) == min(n, -(-max(end - begin, 0) // 64)) and max(tiles, default=0) - min(tiles, default=0) <= 1
        )


def test_nothing_to_do(device):
    inputs = make(Decode((20, 30)), device)
    none = inputs._replace(q=inputs.q[:0], page_table=inputs.page_table[:0], seqlens=inputs.seqlens[:0])
    out, lse = flash_decode(*none.arguments, return_lse=True)
    assert out.shape == (0, 4, 1, 32) and lse.shape == (0, 4, 1)
    no_pages = inputs._replace(page_table=inputs.page_table[:, :0], seqlens=inputs.seqlens * 0)
    out, lse = flash_decode(*no_pages.arguments, return_lse=True)
    assert not out.count_nonzero() and (lse == -math.inf).all()


def test_compiled_and_as_an_operator(device):
    inputs = make(Decode((40, 33), n_tokens=2, dtype="fp32"), device)

    def call(*arguments):
        return flash_decode(*arguments, window=(20, 0), return_lse=True)

    eager = call(*inputs.arguments)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs.arguments)
    assert all(map(torch.equal, eager, compiled))
    torch.library.opcheck(
        torch.ops.flashattn.decode.default, (*inputs.arguments, None, None, 0.1, None, None),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@gpu
def test_cuda_graph(device):
    """Recorded once, replayed on longer sequences: nothing of the lengths is decided on the host."""
    case = Decode((900, 700), heads=8, head_dim=64, page_size=64)
    inputs = make(case, device)
    q, k_pages, v_pages, table, seqlens = inputs.arguments
    lengths = seqlens - 200
    flash_decode(q, k_pages, v_pages, table, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_decode(q, k_pages, v_pages, table, lengths, return_lse=True)
    for n in (900, 700), (0, 65):
        lengths.copy_(torch.tensor(n))
        graph.replay()
        assert all(map(torch.equal, (out, lse), flash_decode(*inputs.arguments[:4], lengths, return_lse=True)))


ERRORS = {
    "q": [
        (lambda q: 3, TypeError, r"`q` must be a torch.Tensor, got int"),
        (lambda q: q[0], ValueError, r"`q` must be 4-D, \(batch, heads, n_tokens, head_dim\), got shape \(4, 1, 32\)"),
        (lambda q: q.double(), TypeError, r"`q` must be float16, bfloat16 or float32, got float64"),
        (lambda q: q[:, :, :0], ValueError, r"`q` must have 1 to 16 tokens, got 0; .*flash_attention"),
        (lambda q: q.expand(2, 4, 17, 32), ValueError, r"`q` must have 1 to 16 tokens, got 17"),
        (lambda q: q.expand(2, 4, 1, 32)[:, :3], ValueError, r"`q` must have a number of heads .* the 2 heads of `k_pages`, got 3"),
        (lambda q: q.new_zeros(2, 4, 1, 257), ValueError, r"`q` must have head_dim 1 to 256, got 257"),
        (lambda q: q.to_sparse(), TypeError, r"`q` must be a dense \(strided\) tensor, got layout torch.sparse_coo"),
        (lambda q: q.detach().requires_grad_(), NotImplementedError, r"`q` must not require grad: .*torch.no_grad\(\)"),
    ],
    "k_pages": [
        (lambda x: None, TypeError, r"`k_pages` must be a torch.Tensor, got NoneType"),
        (lambda x: x[0], ValueError, r"`k_pages` must be 4-D, \(n_pages, heads, page_size, head_dim\), got shape"),
        (lambda x: x.half(), ValueError, r"`k_pages` must be float32 like `q`, or float8_e4m3fn, got float16"),
        (lambda x: x[..., :31], ValueError, r"`k_pages` must have head_dim 32 like `q`, got 31"),
        (lambda x: x[:, :, :8], ValueError, r"`k_pages` must have page_size 16, 32, 64, 128 or 256, got 8"),
        (lambda x: x.to("meta"), ValueError, r"`k_pages` must be on \w+(:0)? like `q`, got meta"),
        (lambda x: x.detach().requires_grad_(), NotImplementedError, r"`k_pages` must not require grad"),
    ],
    "v_pages": [
        (lambda x: x.half(), ValueError, r"`v_pages` must be float32 like `k_pages`, got float16"),
        (lambda x: x[:-1], ValueError, r"`v_pages` must have n_pages, heads and page_size \(\d+, 2, 16\) like `k_pages`"),
        (lambda x: x.new_zeros(*x.shape[:3], 257), ValueError, r"`v_pages` must have head_dim 1 to 256, got 257"),
    ],
    "page_table": [
        (lambda x: [[0]], TypeError, r"`page_table` must be a torch.Tensor, got list"),
        (lambda x: x.long(), TypeError, r"`page_table` must be int32, got int64"),
        (lambda x: x[:1], ValueError, r"`page_table` must be \(batch, max_pages\) with batch 2 like `q`, got shape \(1, 4\)"),
        (lambda x: x.to("meta"), ValueError, r"`page_table` must be on \w+(:0)? like `q`, got meta"),
        (lambda x: x[:, :1].expand(2, 2**26 + 1), ValueError, r"`page_table` must have at most 67108864 pages"),
    ],
    "seqlens": [
        (lambda x: 20, TypeError, r"`seqlens` must be a torch.Tensor, got int"),
        (lambda x: x.long(), TypeError, r"`seqlens` must be int32, got int64"),
        (lambda x: x[None], ValueError, r"`seqlens` must be \(batch,\) with batch 2 like `q`, got shape \(1, 2\)"),
        (lambda x: x.to("meta"), ValueError, r"`seqlens` must be on \w+(:0)? like `q`, got meta"),
    ],
    "scale": [(lambda x: "1", TypeError, r"`scale` must be a number or None, got str")],
    "window": [(lambda x: 3, TypeError, r"`window` must be None or \(left, right\)")],
    "softcap": [(lambda x: 0.0, ValueError, r"`softcap` must be a positive fp32 number")],
    "return_lse": [(lambda x: 1, TypeError, r"`return_lse` must be True or False, got 1")],
    "k_scale": [(lambda x: torch.ones(()), ValueError, r"`k_scale` must be None for pages that are not float8_e4m3fn, got pages in float32")],
    "v_scale": [(lambda x: torch.ones(()), ValueError, r"`v_scale` must be None for pages that are not float8_e4m3fn")],
}  # fmt: skip


@parametrize("name, change, error, message", [(name, *x) for name, rows in ERRORS.items() for x in rows])
def test_errors(name, change, error, message, device):
    inputs = make(Decode((20, 30), dtype="fp32"), device)
    arguments = dict(zip(("q", "k_pages", "v_pages", "page_table", "seqlens"), inputs.arguments, strict=True))
    with pytest.raises(error, match=message):
        flash_decode(**arguments | {name: change(arguments.get(name))})


@parametrize(
    "scale, error, message",
    [
        (0.5, TypeError, r"`k_scale` must be a torch.Tensor or None, got float"),
        (torch.ones((), dtype=torch.float64), TypeError, r"`k_scale` must be float32, got float64"),
        (torch.ones(3), ValueError, r"`k_scale` must have shape \(\) or \(2,\), one for each key head, got \(3,\)"),
        (torch.ones((), device="meta"), ValueError, r"`k_scale` must be on \w+(:0)? like `q`, got meta"),
    ],
)
def test_errors_of_scales(scale, error, message, device):
    inputs = make(Decode((20, 30), dtype="fp32"), device)
    inputs = inputs._replace(k_pages=inputs.k_pages.to(decode.E4M3), v_pages=inputs.v_pages.to(decode.E4M3))
    with pytest.raises(error, match=message):
        flash_decode(*inputs.arguments, k_scale=scale)


def test_fp8_pages_are_refused_where_the_gpu_has_none(monkeypatch, device):
    """A GPU before compute capability 8.9, as far as the call can see."""

    class Seen(torch.Tensor):
        is_cuda = True

    q = torch.zeros(1, 2, 1, 16).as_subclass(Seen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    pages = torch.zeros(1, 2, 16, 16).to(decode.E4M3)
    with pytest.raises(
        NotImplementedError, match=r"`k_pages` must be in the dtype of `q` on this GPU: .* 8.9 or newer"
    ):
        decode._plan(q, pages, pages, None, None, None, None, 1.0, None, None)


def test_other_errors_are_those_of_flash_attention(monkeypatch):
    inputs = make(Decode((20, 30), dtype="fp32"), "cpu")
    from flashattn import primitives

    monkeypatch.setattr(decode, "PLANS", {})
    monkeypatch.setattr(primitives.INTERPRETED, "value", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        flash_decode(*inputs.arguments)


JOBS = [
    # target, q, pages, head_dim, page_size, rows, more
    ("sm_75", "fp16", "fp16", 128, 64, 4, {}),
    ("sm_80", "bf16", "bf16", 128, 16, 4, {}),
    ("sm_86", "fp16", "fp16", 256, 64, 32, {}),
    ("sm_89", "bf16", "fp8", 128, 64, 4, {}),
    ("sm_90", "bf16", "bf16", 128, 64, 4, {}),
    ("sm_90", "bf16", "bf16", 128, 64, 4, dict(merged=False)),
    ("sm_90", "fp16", "fp16", 64, 16, 32, dict(window=True, softcap=True)),
    ("sm_90", "fp16", "fp8", 256, 256, 16, {}),
    ("sm_90", "fp32", "fp32", 128, 64, 4, {}),
    ("sm_100", "bf16", "bf16", 128, 64, 4, {}),
    ("sm_120", "bf16", "bf16", 128, 64, 4, {}),
]


def test_compiles_for_gpus_that_are_not_here():
    """In half precision nothing spills, K and V come in 16 bytes a thread, copied while others are multiplied."""
    rows = [json.loads(line) for line in python(COMPILE, json.dumps(JOBS)).splitlines()]
    assert len(rows) == len(JOBS)
    for (target, q, pages, *_), row in zip(JOBS, rows, strict=True):
        if q != "fp32":
            assert row["spill_stores_bytes"] == 0, row
        assert row["shared_bytes"] <= row["shared_limit"], row
        if target != "sm_75":
            assert row["tensor_cores"] == (q != "fp32"), row
            assert row["copies"] == ["0x10"] or pages == "fp8", row
            assert not row["wgmma"], row  # Triton 3.6 compiles tiles of 16 and 32 rows wrongly for them
