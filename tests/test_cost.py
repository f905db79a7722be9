"""The formulas against measured peaks and against counting by loops."""

import pytest
import torch

from flashattn import attention_tiled, cost
from flashattn.bench import peak_memory_bytes
from flashattn.gpt import GPT, mixed_precision, next_token_loss
from flashattn.peers import naive_attention

SHAPE = dict(batch=2, heads=4, heads_kv=4, seqlen_q=256, seqlen_k=256, head_dim=16)


def draw():
    return [torch.randn(2, 4, 256, 16) for _ in range(3)]


@pytest.mark.parametrize("training", [False, True])
def test_standard_peak(training):
    q, k, v = draw()
    given = sum(x.nbytes for x in (q, k, v))

    def step():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(naive_attention(*leaves).sum(), leaves)

    peak = peak_memory_bytes(step if training else lambda: naive_attention(q, k, v), "cpu") + given
    expected = cost.standard_peak_bytes(**SHAPE, dtype_bytes=4, matrices=3 if training else 2)
    assert expected <= peak <= expected * 1.1


def test_tiled_peak_does_not_grow_with_the_square():
    def peak(seqlen):
        q, k, v = (torch.randn(1, 2, seqlen, 16) for _ in range(3))
        return peak_memory_bytes(lambda: attention_tiled(q, k, v), "cpu")

    small, large = peak(256), peak(1024)
    assert large < 4 * small


def test_flops_count_every_multiplication():
    n, m, d = 5, 7, 3
    count = 2 * sum(1 for _ in range(n) for _ in range(m) for _ in range(d)) * 2
    assert cost.attention_flops(1, 1, n, m, d) == count
    assert cost.attention_flops(2, 3, n, m, d, causal=True) == 6 * count // 2


@pytest.mark.parametrize("block_m", [16, 64, 100])
def test_flash_traffic_counts_every_load(block_m):
    n, m, d, size = 200, 130, 8, 2
    loaded = 0
    for start in range(0, n, block_m):
        rows = min(start + block_m, n) - start
        loaded += 2 * rows * d * size + rows * 4 + 2 * m * d * size
    assert cost.flash_traffic_bytes(1, 1, n, m, d, size, block_m=block_m) == loaded


def test_roofline_is_the_slower_of_the_two():
    gpu = cost.Gpu(1, bandwidth_bytes_per_s=10.0, matmul_flops_per_s=100.0, shared_bytes=1)
    assert cost.roofline_s(1000, 10, gpu) == 10 and cost.roofline_s(10, 1000, gpu) == 100


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa_flash"])
@pytest.mark.parametrize(
    "batch, seqlen, layers, width, heads, vocab",
    [(1, 512, 4, 64, 8, 64), (1, 512, 2, 64, 2, 2048), (4, 64, 2, 128, 2, 4096), (1, 64, 2, 256, 4, 512)],
    ids=["scores", "logits", "tokens", "weights"],
)
def test_gpt_memory(batch, seqlen, layers, width, heads, vocab, attention, dtype):
    """The peak of a whole training step; the parts named in the ids lead. Norms, biases and positions are on top."""
    model = GPT(vocab, seqlen, layers, width, heads, attention)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(vocab, (batch, seqlen))

    def step():
        optimizer.zero_grad()
        with mixed_precision("cpu", dtype):
            loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    moments = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    peak = peak_memory_bytes(step, "cpu") + sum(x.nbytes for x in model.parameters()) + moments
    sizes = cost.gpt_memory_bytes(
        cost.Gpt(layers, width, heads, vocab), batch, seqlen,
        standard=attention == "eager", dtype_bytes=2 if dtype else 4, matrices=2,
    )  # fmt: skip
    assert 0.98 <= peak / cost.gpt_peak_bytes(sizes) <= 1.08


def test_gpt_flops_are_those_of_its_matrix_products():
    from torch.utils.flop_counter import FlopCounterMode

    gpt = cost.Gpt(3, 64, 4, 256)
    model, tokens = GPT(256, 128, 3, 64, 4, "eager"), torch.randint(256, (2, 128))
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens), tokens).backward()
    assert counter.get_total_flops() == 2 * 128 * cost.gpt_flops_per_token(gpt, 128, causal=False)
