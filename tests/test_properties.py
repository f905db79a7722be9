"""What holds between calls of the kernels, whatever the numbers are: hypothesis draws the calls.

No result is compared with the reference here, so a mistake that both share would show. Where two calls do the same
arithmetic in the same order, their results must agree to the bit. Elsewhere each call may be off by its error budget
(``flashattn.testing``), so two that should agree may differ by the sum of their budgets; the budgets are absolute
errors, made of what plain PyTorch errs on the inputs of each call.
"""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flashattn import attention_reference
from flashattn.fuzz import FAR, LAYOUTS, ROW_MULTIPLE, Variant, kernels, runs_here
from flashattn.notebook import HAS_GPU
from flashattn.reference import visible_keys
from flashattn.testing import UNUSED_ROWS, Case, Inputs, error_budget, make_inputs, max_error, run

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, in the interpreter

EXAMPLES, LONGEST = (100, 300) if HAS_GPU else (4, 80)
# In the interpreter an example takes a second, too long to look for a smaller one that fails.
some_examples = settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate] + ([Phase.shrink] if HAS_GPU else []),
    derandomize=True,
    deadline=None,
    database=None,
    # The fixture that poisons memory sets a switch, which holds for one example as well as for all of them.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# What is compiled into the kernels. Every head_dim is a multiple of 16: then slices run the kernels of the whole.
MENU = (
    Variant(16, 16, "fp32", "mixed", "right"),
    Variant(64, 64, "fp16", "heads", "right"),
    Variant(48, 16, "fp16", "rows"),
    Variant(32, 64, "bf16", "heads", "both", softcap=True),
    Variant(16, 32, "fp32", "mixed", softcap=True),
    Variant(64, 64, "fp16", "mixed", "left"),
    Variant(32, 32, "bf16", "rows", "both"),
)
EVERY_SIDE = ("right", "left", "both", "")
# hypothesis takes what stands first for the simplest, and tries it first: here and below it is something that tells.
EDGES = (70, 1, 65, 0, 64, 63, 2)


class Drawn(NamedTuple):
    """A case, how its tensors lie in memory, and what they are drawn from."""

    case: Case
    layout: str
    seed: int

    def inputs(self, device):
        return make_inputs(self.case, device, self.seed, LAYOUTS[self.layout], ROW_MULTIPLE)


ROWS = st.sampled_from(EDGES) | st.integers(0, LONGEST)
FEW_ROWS = st.integers(5, 40)
PAIRS = st.just([(3, 5), (65, 70), (0, 2), (20, 4)]) | st.lists(
    st.tuples(*[st.sampled_from(EDGES[1:]) | st.integers(0, 40)] * 2), min_size=1, max_size=4
)


def inner(lo, hi):
    """Draw a whole number from lo to hi, the middle first."""
    return st.just((lo + hi) // 2) | st.integers(lo, hi)


@st.composite
def cases(draw, sides=EVERY_SIDE, softcap=True, packed=False, families=("gaussian", "low", "large"), rows=ROWS):
    """Draw a case whose window has one of these sets of sides, the simplest the first of them."""
    fitting = [x for x in MENU if runs_here(x) and x.sides in sides and (softcap or not x.softcap)]
    variant = draw(st.sampled_from(sorted(fitting, key=lambda x: sides.index(x.sides))))
    seqlen_q, seqlen_k = zip(*draw(PAIRS), strict=True) if packed else (draw(rows), draw(rows))
    side = st.sampled_from((20, 0, 1, FAR)) | st.integers(0, LONGEST)
    left = draw(side) if variant.sides in ("left", "both") else None
    right = draw(side) if variant.sides in ("right", "both") else None
    causal = right is not None and draw(st.booleans())
    heads_kv = draw(st.integers(1, 2))
    case = Case(
        seqlen_q, seqlen_k, variant.head_dim, variant.dtype, causal,
        heads=heads_kv * draw(st.sampled_from((2, 1, 3) if HAS_GPU else (2, 1))), heads_kv=heads_kv,
        batch=draw(st.integers(1, 3 if HAS_GPU else 2)),
        scale=draw(st.sampled_from((None, 0.3, -0.2))), family=draw(st.sampled_from(families)),
        window=None if left is None and right is None else (left, right),
        softcap=draw(st.sampled_from((100.0, 300.0))) if variant.softcap else None, head_dim_v=variant.head_dim_v,
    )  # fmt: skip
    return Drawn(case, variant.layout, draw(st.integers(0, 2**16)))


def careful_budget(inputs, reference, **options):
    """Return ``error_budget``, with an allowance in fp32, where eager alone is no safe yardstick.

    On a few rows eager can be lucky, and on small shapes it adds in another order. A score is a sum of head_dim
    products, so rounding shifts it by about eps * sqrt(head_dim) * scale * |q| |k| (Cauchy and Schwarz): the relative
    error of its exponential, and of a result made of these. One eps more is for the product with v.
    """
    truth, budget = error_budget(inputs, reference, **options)
    if inputs.q.dtype == torch.float32:
        norm_q, norm_k = (x.nan_to_num().norm(dim=-1).max().item() if x.numel() else 0.0 for x in (inputs.q, inputs.k))
        head_dim, scale = inputs.q.shape[-1], options.get("scale")
        scale = head_dim**-0.5 if scale is None else abs(scale)
        share = torch.finfo(torch.float32).eps * (1 + math.sqrt(head_dim) * scale * norm_q * norm_k)
        for name, x in truth.items():
            budget[name] += share * (x.masked_fill(x.isinf(), 0).abs().max().item() if x.numel() else 0.0)
    return truth, budget


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def in_layout_of(x, values):
    """Return a copy of values with the strides of x."""
    return torch.empty_strided(values.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(values)


def assert_same_bits(results, expected):
    for name, x in expected.items():
        assert torch.equal(results[name], x), f"{name} differs by {max_error(results[name], x):.3g}"


def assert_agree(results, expected, *budgets):
    """Two results that should be one may differ by the sum of what each call may be off."""
    for name, x in expected.items():
        error, allowed = max_error(results[name], x), sum(budget[name] for budget in budgets)
        assert error <= allowed, f"{name} differs by {error:.3g}, may differ by {allowed:.3g}"


@some_examples
@given(cases(softcap=False), st.integers(0, 2**16))
def test_shifting_all_scores_of_a_row(device, drawn, seed):
    """A constant added to a row's scores cancels in the softmax; lse moves by it. The last column of q carries it."""
    case, inputs = drawn.case, drawn.inputs(device)
    scale = case.scale or case.head_dim**-0.5
    shift = torch.randint(-64, 65, inputs.dlse.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    inputs.k[..., -1] = 1
    still, moved = (inputs._replace(q=in_layout_of(inputs.q, inputs.q)) for _ in range(2))
    still.q[..., -1] = 0
    moved.q[..., -1] = shift.to(moved.q.dtype)
    expected, results = (run(kernels, x, **case.options) for x in (still, moved))
    budgets = [careful_budget(x, attention_reference, **case.options)[1] for x in (still, moved)]
    expected["lse"] = (expected["lse"].double() + scale * shift).float()
    for gradients in (results, expected):  # the column of shifts is in dk's last column too, where nothing cancels
        gradients["dk"] = gradients["dk"][..., :-1]
    assert_agree(results, expected, *budgets)
    # Scores and sums are fp32 whatever the inputs are. Each of the head_dim products and sums of a score, of the
    # seqlen_k sums of its row and of a few steps behind them rounds by at most 2^-24 of what its terms add up to.
    score = abs(scale) * largest(moved.q.double().norm(dim=-1)) * largest(moved.k.double().norm(dim=-1))
    terms = case.head_dim * score + case.seqlen_k + 8 * largest(expected["lse"].nan_to_num(neginf=0)) + 8
    assert max_error(results["lse"], expected["lse"]) <= 2 * 2**-24 * terms
    # The weights of a row add up to 1, so out does not move with the shift and lse moves with it one to one.
    has_key = expected["lse"] != -math.inf
    expected_dq = (scale * inputs.dlse * has_key)[..., None].to(torch.float32)
    assert max_error(results["dq"][..., -1:], expected_dq) <= sum(budget["dq"] for budget in budgets)


@some_examples
@given(cases(sides=("",)), st.integers(0, 2**16))
def test_order_of_the_keys(device, drawn, seed):
    """Without a mask attention is a sum over keys: in another order out, lse and dq stay, dk and dv go along."""
    case, inputs = drawn.case, drawn.inputs(device)
    order = torch.randperm(case.seqlen_k, generator=torch.Generator().manual_seed(seed)).to(device)
    k, v = (in_layout_of(x, x[:, :, order]) for x in (inputs.k, inputs.v))
    permuted = inputs._replace(k=k, v=v)
    expected, results = (run(kernels, x, **case.options) for x in (inputs, permuted))
    expected |= {name: expected[name][:, :, order] for name in ("dk", "dv")}
    budgets = [careful_budget(x, attention_reference, **case.options)[1] for x in (inputs, permuted)]
    assert_agree(results, expected, *budgets)


def in_two_parts(attention, n_first):
    """Return attention that meets the first n_first keys and the others in calls of their own and merges the two."""

    def merged(q, k, v, *, causal=False, window=None, **options):
        n_others = k.shape[2] - n_first
        left, right = window or (None, None)
        right = 0 if causal else right
        # The others end where all keys end. The first end n_others earlier, so a query stands n_others further right.
        sides = (None if left is None else left - n_others, None if right is None else right + n_others)
        first = attention(q, k[:, :, :n_first], v[:, :, :n_first], window=sides, **options)
        others = attention(q, k[:, :, n_first:], v[:, :, n_first:], window=(left, right), **options)
        lses = torch.stack((first[1], others[1])).double()
        nothing = (lses == -math.inf).all(dim=0)
        lse = torch.logsumexp(lses.masked_fill(nothing, 0), dim=0).masked_fill(nothing, -math.inf)
        weights = torch.exp(lses - lse.masked_fill(nothing, 0))
        out = weights[0, ..., None] * first[0].double() + weights[1, ..., None] * others[0].double()
        return out.to(v.dtype), lse.to(first[1].dtype)

    return merged


@some_examples
@given(cases(), st.data())
def test_keys_in_two_parts(device, drawn, data):
    """Attention to some keys and attention to the others make attention to all, weighted by exp(lse)."""
    case, inputs = drawn.case, drawn.inputs(device)
    left = (case.window or (None,))[0]
    n_first = data.draw(inner(0 if left is None else max(0, case.seqlen_k - left), case.seqlen_k), "n_first")
    expected = run(kernels, inputs, **case.options)
    results = run(in_two_parts(kernels, n_first), inputs, **case.options)
    references = attention_reference, in_two_parts(attention_reference, n_first)
    assert_agree(results, expected, *(careful_budget(inputs, x, **case.options)[1] for x in references))


@some_examples
@given(cases(rows=FEW_ROWS), st.data())
def test_batch_entries_and_heads_are_alone(device, drawn, data):
    """One key head of one batch entry, with its queries or with one head of them, gives the bits it gives in company."""
    group = data.draw(st.sampled_from((2, 1, 3)), "group")
    case = drawn.case._replace(batch=2, heads=2 * group, heads_kv=2)
    inputs = drawn._replace(case=case).inputs(device)
    entry, head_kv = data.draw(st.sampled_from([(1, 1), (0, 1), (1, 0)]), "entry, head_kv")
    head = head_kv * group + data.draw(st.integers(0, group - 1), "head of the group")
    whole = run(kernels, inputs, **case.options)
    for heads, names in (
        (slice(head_kv * group, (head_kv + 1) * group), ("out", "lse", "dq", "dk", "dv")),
        (slice(head, head + 1), ("out", "lse", "dq")),
    ):
        place = {name: (slice(entry, entry + 1), slice(head_kv, head_kv + 1)) for name in ("k", "v", "dk", "dv")}
        place |= {name: (slice(entry, entry + 1), heads) for name in ("q", "do", "dlse", "out", "lse", "dq")}
        alone = Inputs(*(x[place[name]] for name, x in inputs._asdict().items()))
        results = run(kernels, alone, **case.options)
        assert_same_bits(results, {name: whole[name][place[name]] for name in names})


@some_examples
@given(cases(sides=("both", "right")), st.data())
def test_queries_in_two_parts(device, drawn, data):
    """Under a causal mask, with or without a window, the first queries need only the keys up to the last of them.

    A prefix of queries with its prefix of keys, so that the last stays aligned with the last, gives the bits it gives
    in the whole: what the whole does beyond is to add zeros. The other queries, with all keys, begin a block elsewhere
    than in the whole, so their tiles may come in another order.
    """
    left = (drawn.case.window or (None,))[0]
    case = drawn.case._replace(causal=True, window=None if left is None else (left, None))
    inputs = drawn.inputs(device)
    n = data.draw(inner(0, case.seqlen_q), "n")
    m = max(0, n + case.seqlen_k - case.seqlen_q)
    q, k, v, do, dlse = inputs
    first = Inputs(q[:, :, :n], k[:, :, :m], v[:, :, :m], do[:, :, :n], dlse[:, :, :n])
    last = Inputs(q[:, :, n:], k, v, do[:, :, n:], dlse[:, :, n:])
    whole, of_first, of_last = (run(kernels, x, **case.options) for x in (inputs, first, last))
    budgets = [careful_budget(x, attention_reference, **case.options)[1] for x in (inputs, first, last)]
    assert_same_bits(of_first, {name: whole[name][:, :, :n] for name in ("out", "lse", "dq")})
    assert_agree(of_last, {name: whole[name][:, :, n:] for name in ("out", "lse", "dq")}, budgets[0], budgets[2])
    for name in ("dk", "dv"):
        total = of_last[name].double()
        total[:, :, :m] += of_first[name].double()
        assert_agree({name: total}, {name: whole[name]}, *budgets)


@some_examples
@given(cases(("both", "right", "left", ""), packed=True), st.data())
def test_packed_sequences_are_alone(device, drawn, data):
    """A packed sequence gives the bits it gives without the others, and agrees with flash_attention on it."""
    case, inputs = drawn.case, drawn.inputs(device)
    index = data.draw(inner(0, len(case.seqlen_q) - 1), "sequence")
    begin_q, begin_k = sum(case.seqlen_q[:index]), sum(case.seqlen_k[:index])
    rows_q = slice(begin_q, begin_q + case.seqlen_q[index])
    rows_k = slice(begin_k, begin_k + case.seqlen_k[index])
    alone_case = case._replace(seqlen_q=case.seqlen_q[index : index + 1], seqlen_k=case.seqlen_k[index : index + 1])
    q, k, v, do, dlse = inputs
    alone = Inputs(
        *(in_layout_of(x, x[rows]) for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k), (do, rows_q))),
        in_layout_of(dlse, dlse[:, rows_q]),
    )
    dense = Inputs(*(x.transpose(0, 1)[None] for x in alone[:4]), alone.dlse[None])

    packed = run(kernels, inputs, **case.options, **case.offsets(device))
    for name, x in packed.items():
        unused = x[..., -UNUSED_ROWS:] if name == "lse" else x[-UNUSED_ROWS:]
        assert (unused == (-math.inf if name == "lse" else 0)).all(), f"{name} of tokens of no sequence"
    expected = {
        name: x[rows_k] if name in ("dk", "dv") else x[:, rows_q] if name == "lse" else x[rows_q]
        for name, x in packed.items()
    }
    assert_same_bits(run(kernels, alone, **case.options, **alone_case.offsets(device)), expected)
    results = run(kernels, dense, **case.options)
    results = {name: x[0] if name == "lse" else x[0].transpose(0, 1) for name, x in results.items()}
    if HAS_GPU:  # two kernels there, compiled apart
        budget = careful_budget(dense, attention_reference, **case.options)[1]
        assert_agree(results, expected, budget, budget)
    else:
        assert_same_bits(results, expected)


@some_examples
@given(cases())
def test_gradients_balance(device, drawn):
    """q dq adds up to what k dk adds up to, since only their products count; do out to what v dv does: out is linear in v.

    The sums go over one key head and its group; a term may be off by its factor times the budget.
    """
    case, inputs = drawn.case, drawn.inputs(device)
    results = run(kernels, inputs, **case.options)
    _, budget = careful_budget(inputs, attention_reference, **case.options)
    tensors = {name: x.double() for name, x in (inputs._asdict() | results).items()}

    def total(x):  # over rows and columns, and over the heads of a group
        return x.sum(dim=(2, 3)).unflatten(1, (case.heads_kv, -1)).sum(dim=2)

    for one, other in ((("q", "dq"), ("k", "dk")), (("do", "out"), ("v", "dv"))):
        difference = total(tensors[one[0]] * tensors[one[1]]) - total(tensors[other[0]] * tensors[other[1]])
        allowed = sum(total(tensors[x].abs()) * budget[result] for x, result in (one, other))
        assert (difference.abs() <= allowed).all(), (one, other, difference, allowed)


@some_examples
@given(cases(("both", "left", "right", ""), families=("gaussian",), rows=ROWS.filter(bool)), st.data())
def test_a_query_touches_what_it_sees(device, drawn, data):
    """Where the gradient of one row alone arrives, dv is not 0 for the keys that it sees and exactly 0 for all others.

    And whatever stands in the others changes no bit of that row.
    """
    # At the default scale no weight is so small that fp16 makes it 0.
    case, inputs = drawn.case._replace(scale=None), drawn.inputs(device)
    row = data.draw(inner(0, case.seqlen_q - 1), "row")
    visible = visible_keys(
        torch.tensor(row), torch.arange(case.seqlen_k), case.seqlen_k - case.seqlen_q,
        causal=case.causal, window=case.window,
    ).to(device)  # fmt: skip
    others = torch.arange(case.seqlen_q, device=device) != row
    inputs.do[:, :, others] = 0
    inputs.dlse[:, :, others] = 0
    results = run(kernels, inputs, **case.options)
    touched = (results["dv"] != 0).any(dim=-1)
    assert torch.equal(touched, visible.expand_as(touched)), (touched != visible).nonzero()
    assert not results["dk"][:, :, ~visible].any()
    assert not results["dq"][:, :, others].any()
    generator = torch.Generator().manual_seed(drawn.seed + 1)
    k, v = (in_layout_of(x, x) for x in (inputs.k, inputs.v))
    for x in (k, v):  # not x[:, :, ~visible] = …: on a GPU torch 2.11 writes that elsewhere in its deterministic mode
        x.copy_(torch.where(visible[:, None], x, 10 * torch.randn(x.shape, generator=generator).to(x)))
    changed = run(kernels, inputs._replace(k=k, v=v), **case.options)
    assert_same_bits(
        {name: changed[name][:, :, row] for name in ("out", "lse", "dq")},
        {name: results[name][:, :, row] for name in ("out", "lse", "dq")},
    )


@some_examples
@given(cases(sides=("both", "right")))
def test_ways_to_say_causal(device, drawn):
    """causal=True, a window that ends at the query, and both at once are one mask."""
    inputs, options = drawn.inputs(device), drawn.case.options
    left = options.pop("window", (None,))[0]
    ways = [dict(causal=True, window=(left, right)) for right in (None, 3)] + [dict(causal=False, window=(left, 0))]
    first, *rest = (run(kernels, inputs, **options | way) for way in ways)
    for results in rest:
        assert_same_bits(results, first)
