"""Ring attention: several processes, each with a share of the sequence, against one process with the whole of it."""

import math

import pytest
import torch
import torch.distributed as dist
from processes import Ranks

import flashattn.ring
from flashattn import attention_reference, bench, cost, flash_attention
from flashattn.bench import peak_memory_bytes
from flashattn.peers import Shape
from flashattn.reference import visible_keys
from flashattn.ring import heads_per_turn, ring_attention, ring_positions, ring_shard, ring_unshard, visible_part
from flashattn.ring_bench import reference_by_rows
from flashattn.testing import Case, Inputs, budget_ratios, error_budget, make_inputs, run

pytestmark = pytest.mark.triton
two_gpus = pytest.mark.two_gpus
ROW_DIM = dict(out=2, lse=2, dq=2, dk=2, dv=2)

# seqlen is a multiple of 2, 4 and 6 (of the ranks' chunks), and of no block. Heads need not divide among ranks.
CASES = [
    Case(84, 84, 16, "fp32", causal=True, batch=1),
    Case(156, 156, 24, "bf16", causal=True, heads=3, heads_kv=1, batch=1, head_dim_v=40, scale=-0.3, family="low"),
    Case(36, 84, 16, "fp16", heads=3, heads_kv=3, family="low"),
    Case(84, 12, 64, "bf16", heads=2, heads_kv=1, batch=1),
    Case(12, 12, 16, "fp32", causal=True, batch=1, scale=0.0),
]


def whole_inputs(case, device="cpu", dlse=True):
    inputs = make_inputs(case, device)
    return inputs if dlse else inputs._replace(dlse=None)


def share_of(inputs, n_ranks, rank):
    """Return a rank's rows of all inputs, those of q, k, v and do in layouts of their own."""
    share = [None if x is None else ring_shard(x, n_ranks, rank) for x in inputs]
    share[0] = share[0].transpose(1, 2).contiguous().transpose(1, 2)
    share[3] = share[3].mT.contiguous().mT
    return Inputs(*share)


def run_rank(case, dlse=True, ranks=None, rows_per_turn=None, gpus=False):
    """Call ring_attention on this rank's share; return its results on the CPU, None where the rank is not in ranks."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    group = dist.group.WORLD if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    flashattn.ring.ROWS_PER_TURN = rows_per_turn or 2**17
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    inputs = share_of(whole_inputs(case, f"cuda:{dist.get_rank()}" if gpus else "cpu", dlse), n_ranks, rank)
    results = run(ring_attention, inputs, group=group, causal=case.causal, scale=case.scale, return_lse=True)
    return {name: x.cpu() for name, x in results.items()}


def unshard(results):
    results = [shares for shares in results if shares is not None]
    return {name: ring_unshard([shares[name] for shares in results], dim) for name, dim in ROW_DIM.items()}


def check_within_budget(results, case, **kwargs):
    inputs = whole_inputs(case, **kwargs)
    truth, budget = error_budget(inputs, **case.options)
    ratios = budget_ratios(unshard(results), inputs, truth, budget)
    assert max(ratios.values()) <= 1, ratios


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def triples(tmp_path_factory):
    with Ranks(3, tmp_path_factory.mktemp("three")) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("ranks", ["pairs", "triples"])
def test_within_the_budget_of_one_process(case, ranks, request):
    check_within_budget(request.getfixturevalue(ranks)(run_rank, case), case)


def test_without_a_gradient_of_lse(pairs):
    check_within_budget(pairs(run_rank, CASES[0], False), CASES[0], dlse=False)


def test_a_group_of_some_ranks(triples):
    results = triples(run_rank, CASES[0], True, [0, 2])
    assert results[1] is None
    check_within_budget(results, CASES[0])


def test_repeats_to_the_bit_whatever_the_heads_of_a_turn(triples):
    case = Case(24, 24, 16, "fp16", causal=True, heads=6, heads_kv=3, batch=1)
    results = [triples(run_rank, case, True, None, rows) for rows in (None, None, 1, 2 * 2 * 8)]
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            assert all(torch.equal(first[name], other[name]) for name in first)


def test_error_of_sums_in_half_precision_does_not_grow_with_ranks(pairs, triples):
    """Partial results are summed in fp32: over three ranks the error is that over two, give or take."""
    case = Case(180, 180, 16, "bf16", causal=True, batch=1, heads=2, heads_kv=2)
    inputs = whole_inputs(case)
    truth, budget = error_budget(inputs, **case.options)
    two, three = (budget_ratios(unshard(ranks(run_rank, case)), inputs, truth, budget) for ranks in (pairs, triples))
    assert all(three[name] <= 1.25 * two[name] for name in two), (two, three)


# ---- One process.


def run_alone(_):
    """Compare a ring of one with flash_attention; run in a group of one rank."""
    inputs = make_inputs(CASES[0])
    ring = run(ring_attention, inputs, causal=True, return_lse=True)
    alone = run(flash_attention, inputs, causal=True, return_lse=True)
    return all(torch.equal(ring[name], alone[name]) for name in alone)


def test_one_rank_is_flash_attention(tmp_path):
    with Ranks(1, tmp_path) as ranks:
        assert ranks(run_alone, None) == [True]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 8])
def test_shares_come_together_again(n_ranks):
    x = torch.randn(2, 3, 48, 5)
    shares = [ring_shard(x, n_ranks, rank) for rank in range(n_ranks)]
    assert all(share.shape == (2, 3, 48 // n_ranks, 5) for share in shares)
    assert torch.equal(ring_unshard(shares), x)
    rows_first = x.transpose(0, 2)
    assert torch.equal(ring_unshard([ring_shard(rows_first, n_ranks, r, dim=0) for r in range(n_ranks)], 0), rows_first)


def test_a_rank_holds_a_chunk_from_each_end():
    assert [ring_positions(12, 3, rank).tolist() for rank in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_parts_are_what_the_mask_shows_and_of_one_size(n_ranks, causal):
    half = 3
    positions = [ring_positions(2 * half * n_ranks, n_ranks, rank) for rank in range(n_ranks)]
    for rank in range(n_ranks):
        for source in range(n_ranks):
            rows, keys, diagonal = visible_part(rank, source, half, causal)
            covered = torch.zeros(2 * half, 2 * half, dtype=torch.bool)
            covered[rows, keys] = True
            if diagonal:
                covered &= torch.ones_like(covered).tril()
            expected = visible_keys(positions[rank][:, None], positions[source][None, :], 0, causal=causal)
            assert torch.equal(covered, expected)
            size = covered.sum().item()
            assert size == 4 * half**2 if not causal else size == 2 * half**2 + (half if source == rank else 0)


def test_turns_cover_all_heads_and_shrink_as_rows_grow(monkeypatch):
    assert heads_per_turn(1, 16, 16, 2**17) == 1 and heads_per_turn(1, 16, 16, 2**10) == 16
    assert heads_per_turn(1, 16, 4, 2**15) == 1 and heads_per_turn(4, 64, 64, 2**12) == 8
    assert heads_per_turn(1, 8, 8, 2**20) == 1
    monkeypatch.setattr(flashattn.ring, "ROWS_PER_TURN", 3 * 2 * 7)
    turns = list(flashattn.ring._turns(torch.empty(1, 10, 7, 1), torch.empty(1, 5, 7, 1)))
    assert turns == [(slice(0, 6), slice(0, 3)), (slice(6, 10), slice(3, 5))]


# ---- What it costs.


def record_order(case):
    """Return the order in which this rank sends, receives, launches and waits."""
    events = []

    def spy(module, name, event):
        call = getattr(module, name)

        def spied(*arguments, **options):
            events.append(event)
            return call(*arguments, **options)

        setattr(module, name, spied)
        return lambda: setattr(module, name, call)

    import flashattn.backward
    import flashattn.forward

    undo = [
        spy(flashattn.forward, "attn_forward", "forward"),
        spy(flashattn.backward, "attn_backward", "backward"),
        spy(dist, "batch_isend_irecv", "pass on"),
        spy(flashattn.ring.Passing, "wait", "wait"),
    ]
    run_rank(case)
    for each in undo:
        each()
    return events


def test_messages_are_on_their_way_while_kernels_run(triples):
    forward = ["pass on", "forward", "wait"] * 2 + ["forward"]
    backward = ["pass on", "backward", "pass on", "wait"]
    backward += ["pass on", "backward", "wait", "pass on", "wait"]
    backward += ["backward", "wait", "pass on", "wait"]
    assert triples(record_order, CASES[0]) == [forward + backward] * 3


def peak_of_rank(case):
    """Return the bytes that a forward and backward pass holds at its peak beyond the share of q, k, v and do."""
    flashattn.ring.ROWS_PER_TURN = 1
    inputs = share_of(whole_inputs(case, dlse=False), dist.get_world_size(), dist.get_rank())
    torch.use_deterministic_algorithms(False)
    return peak_memory_bytes(lambda: run(ring_attention, inputs, causal=True, return_lse=True), "cpu")


def test_memory_is_a_share_and_what_travels(pairs):
    case = Case(32, 32, 128, "fp32", causal=True, heads=8, heads_kv=8, batch=1)
    inputs, rows = 4 * 8 * 16 * 128 * 4, 8 * 16 * 4
    most = cost.ring_peak_bytes(1, 8, 8, 32, 128, 4, n_ranks=2, turn_heads_kv=1, backward=True) - inputs
    for peak in pairs(peak_of_rank, case):
        assert inputs < peak <= most + 4 * rows  # lse and its low part, and a turn's statistics
    assert most < 1.5 * inputs


# ---- What it refuses.


def refusals(_):
    """Return the messages of calls that must fail; run on every rank of a group."""
    q = torch.randn(1, 2, 6, 16)
    odd = q[:, :, :5]
    calls = [
        lambda: ring_attention(q, q[:, :, :4], q[:, :, :4], causal=True),
        lambda: ring_attention(odd, odd, odd, causal=True),
        lambda: ring_attention(q, q, q, group=7),
        lambda: ring_attention(q, q, q, group=dist.new_group([1 - dist.get_rank()])),
        lambda: ring_attention(q, q, q, causal=1),
        lambda: ring_attention(q, q[..., :8], q),
        lambda: ring_attention(q, q, q, scale=math.nan),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_refusals_name_the_argument(pairs):
    for messages in pairs(refusals, None):
        assert messages == [
            "ValueError: `k` must have seqlen 6 like `q` with causal=True, got 4",
            "ValueError: `q` must have an even seqlen with causal=True, two chunks as ring_shard gives them, got 5",
            "TypeError: `group` must be a torch.distributed process group or None, got int",
            "ValueError: `group` must have this process for a member, got one that has not",
            "TypeError: `causal` must be True or False, got 1",
            "ValueError: `k` must have head_dim 16 like `q`, got 8",
            "ValueError: `scale` must be a finite fp32 number below 2**127 in size, got nan",
        ]


def test_without_a_group():
    q = torch.randn(1, 2, 6, 16)
    with pytest.raises(RuntimeError, match="`group` must be .* after torch.distributed.init_process_group"):
        ring_attention(q, q, q)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: ring_positions(10, 2, 0), "`seqlen` must be a multiple of 4, .* got 10: pad the end"),
        (lambda: ring_positions(12, 2, 2), "`rank` must be 0 to 1, got 2"),
        (lambda: ring_positions(12, 0, 0), "`n_ranks` must be at least 1, got 0"),
        (lambda: ring_shard(torch.empty(1, 1, 10, 4), 2, 0), "`seqlen` must be a multiple of 4"),
        (lambda: ring_unshard([torch.empty(1, 1, 3, 4)] * 2), "`seqlen` must be a multiple of 4"),
    ],
)
def test_lengths_that_do_not_divide(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def second_derivative(_):
    q, k, v = (torch.randn(1, 1, 4, 16, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(ring_attention(q, k, v).sum(), q, create_graph=True)
    try:
        torch.autograd.grad(dq.sum(), k)
    except RuntimeError as error:
        return "cannot be differentiated again" in str(error)


def test_a_second_derivative_raises(pairs):
    assert pairs(second_derivative, None) == [True, True]


def compile_around(_):
    q, k, v = (torch.randn(1, 1, 4, 16, requires_grad=True) for _ in range(3))

    def step(q, k, v):
        return ring_attention(q * 2, k, v, causal=True) + 1

    eager, compiled = step(q, k, v), torch.compile(step, backend="eager")(q, k, v)
    gradients = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (eager, compiled)]
    return torch.equal(eager, compiled) and all(map(torch.equal, *gradients))


def test_what_stands_around_compiles(pairs):
    assert pairs(compile_around, None) == [True, True]


def differentiate_whole(_):
    """Return the gradient of a whole tensor that was sharded, and of the sum that one rank's share has in it."""
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 12, 16, requires_grad=True)
    out = ring_attention(*(ring_shard(y, dist.get_world_size(), dist.get_rank()) for y in x), causal=True)
    out.pow(2).sum().backward()
    return x.grad


def test_gradients_flow_through_shards(pairs):
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 12, 16, requires_grad=True)
    attention_reference(*x, causal=True)[0].pow(2).sum().backward()
    torch.testing.assert_close(sum(pairs(differentiate_whole, None)), x.grad)


# ---- The bench of it, at toy size on CPUs.

TOY = bench.Cell("ring", Shape(1, 4, 2, 16, 16, True), "flashattn")


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(
        bench, "_session", lambda: dict(gpu="Test GPU", n_gpus=1, date="", commit="", torch="", triton="")
    )


def test_bench_measures_two_beside_one(session):
    rows = list(bench.ring_rows(TOY, None, "cpu", limit_s=600))
    assert all(set(row) == set(bench.COLUMNS) for row in rows)
    found = {(row["n_gpus"], row["direction"], row["metric"]): float(row["p50"]) for row in rows}
    for n_gpus in (1, 2):
        for direction in ("forward", "backward", "forward_backward"):
            assert found.pop((n_gpus, direction, "time")) > 0
        assert 0 < found.pop((n_gpus, "forward_backward", "rel_err")) <= 1
    assert 0 <= found.pop((2, "forward_backward", "difference_from_one_gpu")) <= 1
    tensors = 16 * 16 * 2 * (4 * 4 + 4 * 2)
    one = found.pop((1, "forward_backward", "peak_memory"))
    assert tensors < one <= cost.flash_peak_bytes(*TOY.shape.sizes(), 2, backward=True)
    most = cost.ring_peak_bytes(1, 4, 2, 16, 16, 2, n_ranks=2, turn_heads_kv=2, backward=True)
    assert tensors / 2 < found.pop((2, "forward_backward", "peak_memory")) <= most
    assert not found


def test_bench_tells_what_failed_and_what_is_late(session):
    with pytest.raises(RuntimeError, match="rank 0: KeyError: 'fp8'"):
        list(bench.ring_rows(TOY._replace(shape=TOY.shape._replace(dtype="fp8")), None, "cpu"))
    with pytest.raises(RuntimeError, match="not done after 0.2 s"):
        list(bench.ring_rows(TOY, None, "cpu", limit_s=0.2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reference_by_rows_is_the_reference(dtype, causal):
    inputs = make_inputs(Case(50, 50, 16, "bf16"))
    by_rows = run(reference_by_rows, inputs, dtype, causal=causal, rows=16)
    whole = run(attention_reference, inputs, dtype, causal=causal)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    for name in whole:
        torch.testing.assert_close(by_rows[name], whole[name], rtol=tolerance, atol=tolerance)


# ---- Two GPUs.

GPU_CASES = [
    Case(2056, 2056, 128, "bf16", causal=True, heads=6, heads_kv=3),
    Case(2048, 2048, 64, "fp16", causal=True),
    Case(1000, 3000, 64, "bf16", family="low"),
    Case(520, 520, 64, "fp32", causal=True),
]


@pytest.fixture(scope="module")
def gpu_pairs(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("gpus"), gpus=True, timeout_s=120) as ranks:
        yield ranks


@two_gpus
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.id)
def test_two_gpus_within_the_budget_and_the_same_again(case, gpu_pairs):
    first, again, by_head = (gpu_pairs(run_rank, case, True, None, rows, True) for rows in (None, None, 1))
    check_within_budget(first, case)
    for others in (again, by_head):
        for mine, other in zip(first, others, strict=True):
            assert all(torch.equal(mine[name], other[name]) for name in mine)
