"""PagedKVCache against plain tensors: whatever is allocated, appended, shared, cut and freed, nothing is lost."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from flashattn import PagedKVCache, attention_reference
from flashattn.api import E4M3
from flashattn.notebook import HAS_GPU, HAS_TRITON, device
from flashattn.paged import OutOfPages

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
parametrize, triton = pytest.mark.parametrize, pytest.mark.triton
N_PAGES, HEADS_KV, HEADS, HEAD_DIM, HEAD_DIM_V, N_LAYERS = 12, 2, 4, 8, 5, 2


class Cache(RuleBasedStateMachine):
    """A cache of 12 pages of 16 tokens beside a dict from handles to contiguous K and V of both layers."""

    sequences = Bundle("sequences")

    @initialize()
    def begin(self):
        options = dict(n_layers=N_LAYERS, page_size=16, head_dim_v=HEAD_DIM_V, dtype=torch.float32, device=device)
        self.cache = PagedKVCache(N_PAGES, HEADS_KV, HEAD_DIM, **options)
        self.plain = {}
        self.generator = torch.Generator().manual_seed(0)
        self.n_compared = 0

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(device)

    @rule(target=sequences)
    def allocate(self):
        handle = self.cache.allocate()
        assert handle not in self.plain
        empty = (torch.empty(N_LAYERS, HEADS_KV, 0, d, device=device) for d in (HEAD_DIM, HEAD_DIM_V))
        self.plain[handle] = tuple(empty)
        return handle

    @rule(target=sequences, sequence=sequences, share=st.floats(0, 1))
    def fork(self, sequence, share):
        n_tokens = round(share * self.cache.length(sequence))
        free = self.cache.n_free
        handle = self.cache.fork(sequence, n_tokens)
        assert self.cache.n_free == free
        self.plain[handle] = tuple(x[:, :, :n_tokens] for x in self.plain[sequence])
        return handle

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        self.cache.free(sequence)
        del self.plain[sequence]
        with pytest.raises(KeyError, match="`sequence` must be what allocate or fork returned and not freed"):
            self.cache.length(sequence)

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence, share):
        n_tokens = round(share * self.cache.length(sequence))
        self.cache.truncate(sequence, n_tokens)
        self.plain[sequence] = tuple(x[:, :, :n_tokens] for x in self.plain[sequence])

    def append_rows(self, batch, counts, add):
        """Call add unless there is no room for it; then nothing may have changed."""
        needed, free = self.cache.pages_needed(batch, counts), self.cache.n_free
        if needed > free:
            with pytest.raises(OutOfPages, match=f"{needed} pages are needed and {free} are free") as raised:
                add()
            assert (raised.value.needed, raised.value.free) == (needed, free)
            assert self.cache.n_free == free
            return None
        step = add()
        assert self.cache.n_free == free - needed
        return step

    @rule(batch=st.lists(sequences, min_size=1, max_size=3, unique=True), n_tokens=st.integers(0, 40))
    def append(self, batch, n_tokens):
        k, v = (self.draw(N_LAYERS, len(batch), HEADS_KV, n_tokens, d) for d in (HEAD_DIM, HEAD_DIM_V))
        step = self.append_rows(batch, n_tokens, lambda: self.cache.append(batch, k, v))
        if step is not None:
            for i, handle in enumerate(batch):
                old_k, old_v = self.plain[handle]
                self.plain[handle] = torch.cat((old_k, k[:, i]), 2), torch.cat((old_v, v[:, i]), 2)
            self.compare_decode(batch, step, n_tokens)

    @rule(batch=st.lists(st.tuples(sequences, st.integers(0, 20)), min_size=1, max_size=3, unique_by=lambda x: x[0]))
    def append_ragged(self, batch):
        handles, counts = [x for x, _ in batch], [n for _, n in batch]
        step = self.append_rows(handles, counts, lambda: self.cache.reserve(handles, counts))
        if step is None:
            return
        k, v = (self.draw(N_LAYERS, sum(counts), HEADS_KV, d) for d in (HEAD_DIM, HEAD_DIM_V))
        for layer in range(N_LAYERS):
            self.cache.write(step, k[layer], v[layer], layer)
        for handle, *new in zip(handles, k.split(counts, 1), v.split(counts, 1), strict=True):
            pairs = zip(self.plain[handle], new, strict=True)
            self.plain[handle] = tuple(torch.cat((old, x.transpose(1, 2)), 2) for old, x in pairs)

    def compare_decode(self, batch, step, n_tokens):
        """Every few steps, attention over the pages beside attention over the plain tensors."""
        self.n_compared += 1
        if not HAS_TRITON or not 1 <= n_tokens <= 16 or self.n_compared % (1 if HAS_GPU else 4):
            return
        q = self.draw(len(batch), HEADS, n_tokens, HEAD_DIM)
        out = self.cache.attend(q, step, 1)
        for i, handle in enumerate(batch):
            k, v = (x[1:] for x in self.plain[handle])
            expected, _ = attention_reference(q[i : i + 1], k, v, causal=True)
            torch.testing.assert_close(out[i : i + 1], expected, rtol=1e-5, atol=1e-5)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "plain"):
            return
        for handle, plain in self.plain.items():
            assert self.cache.length(handle) == plain[0].shape[2]
            for layer in range(N_LAYERS):
                for x, expected in zip(self.cache.contents(handle, layer), plain, strict=True):
                    assert torch.equal(x, expected[layer])

    @invariant()
    def pages_add_up(self):
        if not hasattr(self, "plain"):
            return
        usage = self.cache.usage()
        token_bytes = 4 * N_LAYERS * HEADS_KV * (HEAD_DIM + HEAD_DIM_V)
        assert usage.reserved_bytes == N_PAGES * 16 * token_bytes
        assert usage.allocated_bytes == (N_PAGES - self.cache.n_free) * 16 * token_bytes
        assert usage.logical_bytes == token_bytes * sum(x.shape[2] for x, _ in self.plain.values())
        assert usage.used_bytes <= min(usage.allocated_bytes, usage.logical_bytes)
        assert 0 <= usage.waste < 1

    @precondition(lambda self: getattr(self, "plain", None))
    @rule()
    def tables_name_the_pages(self):
        handles = list(self.plain)
        step = self.cache.step(handles)
        lengths = [self.cache.length(handle) for handle in handles]
        assert step.seqlens.tolist() == lengths and step.page_table.dtype == torch.int32
        for row, n in zip(step.page_table.tolist(), lengths, strict=True):
            n_pages = -(-n // 16)
            assert all(0 <= page < N_PAGES for page in row[:n_pages]) and set(row[n_pages:]) <= {-1}


Cache.TestCase.settings = settings(
    max_examples=100 if HAS_GPU else 25, stateful_step_count=30, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestCache = pytest.mark.triton(Cache.TestCase)


def filled(n_tokens=20, n_pages=8, **options):
    """Return (cache, handle, K, V): one sequence in a cache of fp32, page_size 16, one layer."""
    cache = PagedKVCache(
        n_pages, HEADS_KV, HEAD_DIM, **dict(page_size=16, dtype=torch.float32, device=device) | options
    )
    sequence = cache.allocate()
    k, v = torch.randn(2, 1, HEADS_KV, n_tokens, HEAD_DIM, device=device)
    cache.append([sequence], k, v)
    return cache, sequence, k, v


def test_a_shared_prefix_costs_nothing_until_someone_writes():
    cache, sequence, k, v = filled(40)
    forks = [cache.fork(sequence) for _ in range(3)]
    assert cache.n_free == 5
    row = torch.ones(4, HEADS_KV, 1, HEAD_DIM, device=device)
    assert cache.pages_needed([sequence, *forks], 1) == 3  # the last to write keeps the page
    cache.append([sequence, *forks], row, row)
    assert cache.n_free == 2
    usage = cache.usage()
    assert usage.logical_bytes == 4 * 41 * 128 and usage.used_bytes == (32 + 4 * 9) * 128
    for handle in (sequence, *forks):
        assert torch.equal(cache.contents(handle)[0], torch.cat((k[0], row[0]), 1))
    for handle in (sequence, *forks[:2]):
        cache.free(handle)
    assert cache.n_free == 5 and torch.equal(cache.contents(forks[2])[1], torch.cat((v[0], row[0]), 1))


def test_a_page_of_ones_own_is_written_in_place():
    cache, sequence, *_ = filled(20)
    cache.free(cache.fork(sequence))
    free = cache.n_free
    assert cache.pages_needed([sequence], 12) == 0
    cache.reserve([sequence], 12)
    assert cache.n_free == free


def test_running_out_changes_nothing():
    cache, sequence, k, v = filled(20, n_pages=3)
    other = cache.fork(sequence)
    before = (cache._table.clone(), cache.k_pages.clone(), list(cache._owners), cache.usage())
    with pytest.raises(OutOfPages, match=r"2 pages are needed and 1 are free: free a sequence, or make a larger cache"):
        cache.reserve([sequence, other], [13, 1])
    assert torch.equal(before[0], cache._table) and torch.equal(before[1].nan_to_num(), cache.k_pages.nan_to_num())
    assert before[2:] == (list(cache._owners), cache.usage())
    assert cache.length(sequence) == cache.length(other) == 20
    cache.reserve([other], 1)  # one is free


def test_many_sequences_and_long_ones():
    """The table grows in both directions, and rows of ended sequences are used again."""
    cache = PagedKVCache(500, 1, 4, page_size=16, dtype=torch.float32, device=device)
    handles = [cache.allocate() for _ in range(100)]
    row = torch.arange(100.0, device=device)[:, None, None, None].expand(100, 1, 17, 4)
    cache.append(handles, row, row)
    long = cache.allocate()
    cache.reserve([long], 16 * 290)
    for handle in handles[:50]:
        cache.free(handle)
    again = [cache.allocate() for _ in range(50)]
    assert len(cache._table) == 128
    cache.append(again, -row[:50], row[:50])
    assert cache.step([long]).page_table.shape[1] >= 290
    assert all((cache.contents(handle)[0] == i + 50).all() for i, handle in enumerate(handles[50:]))
    assert all((cache.contents(handle)[0] == -i).all() for i, handle in enumerate(again))


@triton
@parametrize("per_head", [False, True])
def test_fp8(per_head):
    scale = torch.tensor([[0.01, 0.02], [0.03, 0.04]]) if per_head else 0.02
    options = dict(n_layers=2, page_size=16, dtype=E4M3, device=device, k_scale=scale, v_scale=scale)
    cache = PagedKVCache(4, HEADS_KV, 16, **options)
    sequence = cache.allocate()
    k, v = torch.randn(2, 2, 1, HEADS_KV, 20, 16, device=device)
    k[1, 0, 0, 0] = 1e9  # becomes the largest number there is, and not NaN
    step = cache.append([sequence], k, v)
    by_head = torch.as_tensor(scale, device=device).expand(2, 2)
    for layer in range(2):
        scales = by_head[layer][:, None, None]
        rounded = [(x[layer, 0] / scales).clamp(-448, 448).to(E4M3).float() * scales for x in (k, v)]
        stored = cache.contents(sequence, layer)
        assert all(map(torch.equal, stored, rounded))
        q = torch.randn(1, HEADS, 1, 16, device=device)
        if not HAS_GPU or torch.cuda.get_device_capability() >= (8, 9):
            out = cache.attend(q, step, layer)
            expected, _ = attention_reference(q, *(x[None] for x in rounded), causal=True)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert cache.usage().reserved_bytes == 2 * cache.k_pages.numel()
    plain = PagedKVCache(4, HEADS_KV, 16, page_size=16, dtype=E4M3, device=device)
    sequence = plain.allocate()
    plain.append([sequence], k[0], v[0])
    assert torch.equal(plain.contents(sequence)[0], k[0, 0].to(E4M3).float())


CREATION = {
    "n_pages": (0, ValueError, r"`n_pages` must be 1 or more, got 0"),
    "n_heads_kv": (True, ValueError, r"`n_heads_kv` must be 1 or more, got True"),
    "head_dim": (257, ValueError, r"`head_dim` must be 1 to 256, got 257"),
    "head_dim_v": (-1, ValueError, r"`head_dim_v` must be 1 to 256, got -1"),
    "n_layers": (1.5, ValueError, r"`n_layers` must be 1 or more, got 1.5"),
    "page_size": (8, ValueError, r"`page_size` must be 16, 32, 64, 128 or 256, got 8"),
    "dtype": (
        torch.float64,
        TypeError,
        r"`dtype` must be float16, bfloat16, float32 or float8_e4m3fn, got torch.float64",
    ),
    "k_scale": (1.0, ValueError, r"`k_scale` must be None in a cache that is not float8_e4m3fn, got float"),
    "v_scale": (1.0, ValueError, r"`v_scale` must be None in a cache that is not float8_e4m3fn, got float"),
}


@parametrize("name", CREATION)
def test_errors_of_creation(name):
    value, error, message = CREATION[name]
    with pytest.raises(error, match=message):
        PagedKVCache(**dict(n_pages=2, n_heads_kv=1, head_dim=8, device=device) | {name: value})


def test_scales_that_do_not_fit():
    with pytest.raises(ValueError, match=r"`k_scale` must broadcast to \(1, 2\), got \(3,\)"):
        PagedKVCache(2, 2, 8, dtype=E4M3, k_scale=[1.0, 1.0, 1.0], device=device)


def rows(*shape, dtype=torch.float32, on=device):
    return torch.zeros(*shape, dtype=dtype, device=on)


CALLS = [
    (lambda c, s: c.fork(99), KeyError, r"`sequence` must be what allocate or fork returned and not freed, got 99"),
    (lambda c, s: c.fork(s, 21), ValueError, r"`n_tokens` must be 0 to 20, the sequence's length, got 21"),
    (lambda c, s: c.truncate(s, -1), ValueError, r"`n_tokens` must be 0 to 20, the sequence's length, got -1"),
    (lambda c, s: c.free(99), KeyError, r"`sequence` must be"),
    (lambda c, s: c.reserve([s, s]), ValueError, r"`sequences` must name each sequence once, got \[0, 0\]"),
    (lambda c, s: c.reserve([99]), KeyError, r"`sequence` must be"),
    (lambda c, s: c.reserve([s], [1, 2]), ValueError, r"`n_tokens` must be an int or a list of 1, got 2 numbers"),
    (lambda c, s: c.reserve([s], -1), ValueError, r"`n_tokens` must be 0 or more, got -1"),
    (lambda c, s: c.contents(s, 1), ValueError, r"`layer` must be 0 to 0, got 1"),
    (lambda c, s: c.append([s], None, None), TypeError, r"`k` must be a floating-point tensor, got NoneType"),
    (lambda c, s: c.append([s], rows(1, 2, 1, 8), rows(1, 2, 1, 8, dtype=torch.int32)), TypeError, r"`v` must be a floating-point tensor, got torch.int32"),
    (lambda c, s: c.append([s], rows(1, 2, 1, 7), rows(1, 2, 1, 8)), ValueError, r"`k` must be \(1, 1, 2, n_tokens, 8\), got \(1, 1, 2, 1, 7\)"),
    (lambda c, s: c.append([s], rows(1, 2, 1, 8), rows(1, 2, 2, 8)), ValueError, r"`v` must have 1 tokens like `k`, got 2"),
    (lambda c, s: c.append([s], rows(1, 2, 1, 8, on="meta"), rows(1, 2, 1, 8)), ValueError, r"`k` must be on \w+(:0)? like the cache, got meta"),
    (lambda c, s: c.write(c.step([s]), rows(1, 2, 1, 8), rows(1, 2, 1, 8)), ValueError, r"`k` must be \(1, 2, 0, 8\) for this step, got \(1, 2, 1, 8\)"),
    (lambda c, s: c.write(c.reserve([s], [1]), rows(1, 2, 8), rows(1, 2, 7)), ValueError, r"`v` must be \(1, 2, 8\) for this step, got \(1, 2, 7\)"),
    (lambda c, s: c.write(c.step([s]), rows(1, 2, 0, 8), rows(1, 2, 0, 8), 3), ValueError, r"`layer` must be 0 to 0, got 3"),
    (lambda c, s: c.write(c.step([s]), 0, 0), TypeError, r"`k` must be a floating-point tensor, got int"),
    (lambda c, s: c.attend(rows(1, 2, 1, 8), c.step([s]), "0"), ValueError, r"`layer` must be 0 to 0, got '0'"),
]  # fmt: skip


@parametrize("call, error, message", CALLS)
def test_errors_of_calls(call, error, message):
    cache, sequence, k, v = filled()
    free = cache.n_free
    with pytest.raises(error, match=message):
        call(cache, sequence)
    assert cache.n_free == free and torch.equal(cache.contents(sequence, 0)[0][:, :20], k[0])
