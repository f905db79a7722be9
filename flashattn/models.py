"""What whole models take, in memory and time, with each implementation of attention: chapter 11's measurements.

``python -m flashattn.bench --suite model`` runs these functions and records what they yield; its documentation in
flashattn/bench.py says what the rows mean.
"""

import math
import time
from typing import NamedTuple

import torch

from .gpt import GPT, mixed_precision, next_token_loss
from .memory import free_memory, memory_at_most, total_memory_bytes, watch_memory


class Model(NamedTuple):
    """The size of a GPT of :mod:`flashattn.gpt`."""

    layers: int
    width: int
    heads: int
    vocabulary: int


# The article gives layers, width and heads of one model and the gigabytes of two; the rest of each is our choice.
MODELS = {
    "gpt2": Model(12, 768, 12, 50304),  # C44. GPT-2's vocabulary is 50257; a multiple of 64 suits the tensor cores
    "gpt2_bytes": Model(12, 768, 12, 256),  # C11: little but attention
    "gpt2_medium": Model(24, 1024, 16, 50304),  # C11 and C50
    "gpt_10b": Model(48, 4096, 32, 50304),  # C03: 20 GB of weights in bf16
}
# The article's table (C44): {N: (GB, tokens/s)}, None where it ran out of memory or gives no number.
ARTICLE_C44 = {
    "standard": {1024: (8.2, 1200), 2048: (14.5, 980), 4096: (28.7, 620), 8192: (None, None)},
    "flash": {1024: (5.1, 1350), 2048: (6.3, 1180), 4096: (8.9, 890), 8192: (14.2, 540)},
}
SMALLER_CARD_BYTES = 80 * 10**9  # the article's card
TIMED_S, FEWEST_STEPS, MOST_STEPS = 0.5, 3, 20


class AttentionLedger:
    """Call attention, and add up what each call leaves in memory: its output and what the backward pass will need.

    kept_bytes, calls: the sum, and of how many calls, since ``start``.
    """

    def __init__(self, call):
        self.call = call
        self.start(None)

    def start(self, memory):
        """Begin to count with what ``watch_memory`` gave; None to stop."""
        self.memory, self.kept_bytes, self.calls = memory, 0, 0

    def __call__(self, q, k, v):
        if self.memory is None:
            return self.call(q, k, v)
        before = self.memory.allocated_bytes()
        out = self.call(q, k, v)
        self.kept_bytes += self.memory.allocated_bytes() - before
        self.calls += 1
        return out


def training_figures(model, call, batch, seqlen, device="cuda"):
    """Measure training steps of a model: fp32 weights, products in bf16 by autocast, AdamW, random tokens.

    Args:
        model: one of ``MODELS``, or like it.
        call: causal attention, a function of (q, k, v). For one of PyTorch's backends enter ``peers.backend`` first.
        batch, seqlen: sequences in a step, and tokens in each.
        device: where.

    Yields:
        ``(direction, metric, unit, [p20, p50, p80], params)``, as suite "model" of the bench records them.
    """
    device, ledger, short = torch.device(device), AttentionLedger(call), None
    try:
        yield from _training_figures(model, ledger, batch, seqlen, device)
    except Exception as error:
        short = _shortage(error, model, ledger)
    free_memory(device)  # here, where the error no longer holds the tensors
    if short:
        yield "training_step", "out_of_memory", "bytes", [total_memory_bytes(device)] * 3, short


def _training_figures(model, ledger, batch, seqlen, device):
    torch.manual_seed(0)
    with device:
        gpt = GPT(model.vocabulary, seqlen, model.layers, model.width, model.heads, attention=ledger)
        tokens = torch.randint(model.vocabulary, (batch, seqlen + 1))
    optimizer = torch.optim.AdamW(gpt.parameters(), 1e-4, fused=True)

    def forward(between=lambda: None):
        with mixed_precision(device, torch.bfloat16):
            hidden = gpt.hidden(tokens[:, :-1])
            between()
            return next_token_loss(gpt.logits(hidden), tokens[:, 1:])

    def step():
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss.item()

    with watch_memory(device) as memory:
        ledger.start(memory)
        first_loss = step()  # makes the optimizer's state and the workspaces of libraries
    optimizer.zero_grad()
    seen = []
    with watch_memory(device) as memory:
        ledger.start(memory)
        loss = forward(between=lambda: seen.append(memory.allocated_bytes()))
        before_logits, kept = *seen, memory.allocated_bytes()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the GPU
    attention = ledger.kept_bytes
    ledger.start(None)
    states = (x for state in optimizer.state.values() for x in state.values())
    split = dict(
        weights=bytes_of(gpt.parameters()),
        optimizer=bytes_of(states),
        attention=attention,
        activations=before_logits - attention,
        logits=kept - before_logits,
        temporary=memory.peak_bytes - kept,
    )
    peak = sum(split.values())
    params = _sizes(model) | dict(split=split, gradients=bytes_of(x.grad for x in gpt.parameters()))
    yield "training_step", "peak_memory", "bytes", [peak] * 3, params
    rates = [batch * seqlen / seconds for seconds in step_seconds(step)]
    params = _sizes(model) | dict(steps=len(rates), first_loss=round(first_loss, 6))
    yield "training_step", "throughput", "tokens/s", quantiles(rates), params


def forward_figures(model, call, batch, seqlen, device="cuda", limit_bytes=SMALLER_CARD_BYTES):
    """Measure the memory of one forward pass with weights in bf16: of inference, and of training, which keeps more.

    Args:
        model, call, batch, seqlen, device: as for :func:`training_figures`.
        limit_bytes: what PyTorch may have of the GPU's memory, to see a smaller card; on a CPU it is not held.

    Yields:
        What :func:`training_figures` does, for inference and then for training.
    """
    device = torch.device(device)
    with memory_at_most(limit_bytes, device):
        gpt = tokens = None
        for gradients in (False, True):
            ledger, params = AttentionLedger(call), dict(gradients=gradients, limit_bytes=limit_bytes)
            try:
                if gpt is None:
                    gpt, tokens = _half_precision_model(model, batch, seqlen, device)
                gpt.attend = ledger
                peak, split = _forward_memory(gpt, tokens, ledger, gradients)
                figures = "forward", "peak_memory", "bytes", [peak] * 3, _sizes(model) | params | dict(split=split)
            except Exception as error:
                params |= _shortage(error, model, ledger)
                figures = "forward", "out_of_memory", "bytes", [limit_bytes] * 3, params
            free_memory(device)
            yield figures


def _half_precision_model(model, batch, seqlen, device):
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            gpt = GPT(model.vocabulary, seqlen, model.layers, model.width, model.heads, attention=lambda q, k, v: v)
            return gpt, torch.randint(model.vocabulary, (batch, seqlen))
    finally:
        torch.set_default_dtype(default)


def _forward_memory(gpt, tokens, ledger, gradients):
    """Return (peak bytes with the weights, its split) of one forward pass up to the last layer's result."""
    with torch.set_grad_enabled(gradients), watch_memory(tokens.device) as memory:
        ledger.start(memory)
        hidden = gpt.hidden(tokens)
        kept = memory.allocated_bytes()
    del hidden
    attention = ledger.kept_bytes if gradients else 0  # inference frees each layer's before the next
    split = dict(
        weights=bytes_of(gpt.parameters()),
        attention=attention,
        activations=kept - attention,
        temporary=memory.peak_bytes - kept,
    )
    return sum(split.values()), split


def _shortage(error, model, ledger):
    """Return what was kept when memory ran out; raise the error again if it is another one."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in text and "out of memory" not in text:
        raise error
    return _sizes(model) | dict(attention=ledger.kept_bytes, layers_done=ledger.calls)


def _sizes(model):
    """Return what the columns of a row do not say of a model."""
    return dict(layers=model.layers, width=model.width, vocabulary=model.vocabulary)


def bytes_of(tensors):
    """Return the bytes of some tensors."""
    return sum(x.nbytes for x in tensors)


def step_seconds(step):
    """Time a call that ends only when the GPU has: at least FEWEST_STEPS times, and about TIMED_S seconds long."""
    step()
    times, begin = [], time.perf_counter()
    while len(times) < FEWEST_STEPS or (len(times) < MOST_STEPS and time.perf_counter() - begin < TIMED_S):
        last = time.perf_counter()
        step()
        times.append(time.perf_counter() - last)
    return times


def quantiles(values):
    """Return the 20th, 50th and 80th percentile of some numbers."""
    return torch.quantile(torch.tensor(values, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.8]).double()).tolist()


# ---- What recorded rows say, for tables and figures.


def training_table(rows, model="gpt2"):
    """Return what rows of suite "model" say of training steps.

    Args:
        rows: as ``bench.load_rows(gpu, suite="model")`` gives them.
        model: a name in MODELS.

    Returns:
        {impl: {seqlen: {"peak_bytes": …, "tokens_per_s": …, "split": {…}, "gradients": bytes}}}, by growing seqlen;
        {"out_of_memory": bytes} instead where these were not enough.
    """
    table = {}
    for row in sorted(rows, key=lambda row: row["seqlen_q"]):
        if row["direction"] != "training_step" or row["params"].get("model") != model:
            continue
        cell = table.setdefault(row["impl"], {}).setdefault(row["seqlen_q"], {})
        if row["metric"] == "peak_memory":
            cell |= dict(peak_bytes=row["p50"], split=row["params"]["split"], gradients=row["params"]["gradients"])
        elif row["metric"] == "throughput":
            cell["tokens_per_s"] = row["p50"]
        elif row["metric"] == "out_of_memory":
            cell["out_of_memory"] = row["p50"]
    return table


def speed_ratios(rows, impl, *, batch, causal, direction, graph):
    """Return {seqlen: the time of eager over that of impl} of attention alone, by growing seqlen.

    Args:
        rows: as ``bench.load_rows(gpu, suite="model")`` gives them.
        impl: "flashattn" or "sdpa_flash".
        batch, causal, direction, graph: which rows: batch 1, 4 or 16, direction "forward" or "forward_backward".
    """
    wanted = dict(batch=batch, causal=causal, direction=direction, metric="time")
    times = {
        (row["impl"], row["seqlen_q"]): row["p50"]
        for row in rows
        if all(row[name] == value for name, value in wanted.items()) and row["params"] == {"graph": graph}
    }
    seqlens = sorted(seqlen for name, seqlen in times if name == impl and ("eager", seqlen) in times)
    return {seqlen: times["eager", seqlen] / times[impl, seqlen] for seqlen in seqlens}


def crossover(ratios):
    """Return the length from which on a ratio stays at 1 or more, as ``speed_ratios`` gives them.

    It is found between two measured lengths by a straight line on log scales, and is None where the last ratio is
    below 1. Where no ratio is below 1, it is the first length, which is then an upper bound.
    """
    lengths = list(ratios)
    below = [i for i, length in enumerate(lengths) if ratios[length] < 1]
    if not below:
        return float(lengths[0])
    if below[-1] == len(lengths) - 1:
        return None
    n, m = lengths[below[-1]], lengths[below[-1] + 1]
    return n * (m / n) ** (math.log(ratios[n]) / (math.log(ratios[n]) - math.log(ratios[m])))
