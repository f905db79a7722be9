"""attn_implementation="flashattn" in Hugging Face transformers: small random models of real architectures.

Logits and gradients are held to the error budget: the model in fp64 is the truth, with attention written out below
(transformers' eager attention takes its softmax in fp32 whatever the dtype, and gives NaN for it in fp64); eager and
SDPA in the dtype under test are the yardsticks. What the kernels do not have must be refused, or be right in another way.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    T5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.masking_utils import sdpa_mask  # noqa: E402

import flashattn.integrations.transformers as integration  # noqa: E402
from flashattn.paged import OutOfPages  # noqa: E402
from flashattn.testing import FACTOR, max_error  # noqa: E402

pytestmark = pytest.mark.triton
parametrize = pytest.mark.parametrize

BATCH, VOCABULARY, SEQLEN = 2, 40, 14
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=64
)
GROUPED = SMALL | dict(num_attention_heads=2, num_key_value_heads=1)
TOKENS = dict(tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0)
WHISPER = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=12,
    max_target_positions=64, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**GROUPED, **TOKENS),
    "mistral": lambda: MistralConfig(**GROUPED, **TOKENS, sliding_window=5),
    "gemma2": lambda: Gemma2Config(
        **GROUPED | dict(num_hidden_layers=2), **TOKENS, head_dim=16, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, scale_attn_by_inverse_layer_idx=True, **TOKENS,
    ),
    "bert": lambda: BertConfig(
        **SMALL, num_attention_heads=2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, pad_token_id=0
    ),
    "whisper": lambda: WhisperConfig(**WHISPER, **TOKENS),
    "t5": lambda: T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, eos_token_id=None, pad_token_id=0,
    ),
}  # fmt: skip


def exact_attention(
    module, query, key, value, mask, scaling, softcap=None, position_bias=None, **kwargs
):  # transformers names these
    """Attend in the dtype of the inputs, under a boolean mask or none; a query that sees nothing gives 0."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    blind = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~visible & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


def exact_mask(*args, **kwargs):
    return sdpa_mask(*args, **kwargs | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", exact_mask)
DECODERS = ["llama", "mistral", "gemma2", "gpt2"]
CLASSES = dict(bert=AutoModel, whisper=WhisperForConditionalGeneration, t5=AutoModelForSeq2SeqLM)


def make_model(name, implementation, weights_of=None, dtype=torch.float32, device="cpu", **changes):
    """Build a model with the weights of another one, or with random ones large enough that attention matters."""
    config = CONFIGS[name]() if isinstance(name, str) else copy.deepcopy(name)
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = implementation
    make = CLASSES.get(name, AutoModelForCausalLM)
    torch.manual_seed(0)
    model = make._from_config(config) if make is WhisperForConditionalGeneration else make.from_config(config)
    assert model.config._attn_implementation == implementation
    if weights_of is not None:
        model.load_state_dict(weights_of.state_dict())
    else:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device, dtype).eval()


def yardsticks(name):
    """Return the implementations of transformers that the model has; its SDPA has no softcap."""
    return ["eager"] if name == "gemma2" else ["eager", "sdpa"]


def tokens(device, batch=BATCH, seqlen=SEQLEN):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def padding(side, device, batch=BATCH, seqlen=SEQLEN):
    """Return an attention_mask of transformers, 1 for a token; the first row has no padding."""
    mask = torch.ones(batch, seqlen, dtype=torch.long)
    for row, n_padded in enumerate((0, 5)[:batch]):
        if side == "left":
            mask[row, :n_padded] = 0
        elif side == "right":
            mask[row, seqlen - n_padded :] = 0
        elif side == "inside":
            mask[row, 4 : 4 + n_padded] = 0
    return None if side == "none" else mask.to(device)


def run(model, inputs, mask):
    """Return the output at every token and the gradient of each parameter, as a dict."""
    model.zero_grad()
    out = model(**inputs)
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if mask is not None and mask.shape == out.shape[:2]:
        out = out * mask[..., None]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out * direction).sum().backward()
    gradients = {"d " + name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return dict(out=out.detach()) | gradients


def assert_within_budget(name, inputs, device, dtype=torch.float32, mask=None, **changes):
    """Hold flashattn to the budget on one model and one batch."""
    first = make_model(name, "eager", device=device, dtype=dtype, **changes)
    wide = {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}
    truth = run(make_model(name, "exact", first, torch.float64, device, **changes), wide, mask)
    budget = {}
    for implementation in yardsticks(name):
        own = run(make_model(name, implementation, first, dtype, device, **changes), inputs, mask)
        for key, expected in truth.items():
            factor = FACTOR["out" if key == "out" else "dq"]
            allowed = factor * max_error(own[key], expected) + torch.finfo(dtype).eps * expected.abs().max().item()
            budget[key] = max(budget.get(key, 0.0), allowed)
    actual = run(make_model(name, "flashattn", first, dtype, device, **changes), inputs, mask)
    assert actual.keys() == truth.keys()
    over = {key: max_error(actual[key], truth[key]) / budget[key] for key in truth if budget[key]}
    assert max(over.values()) <= 1, {key: ratio for key, ratio in over.items() if not ratio <= 1}


# Each model with and without padding; every side, and a window with each side, at least once.
SIDES = dict(llama=["none", "left", "right", "inside"], mistral=["none", "left", "right", "inside"])
SIDES |= dict(gemma2=["none", "left"], gpt2=["none", "left"], bert=["none", "right"])


@parametrize("name, side", [(name, side) for name, sides in SIDES.items() for side in sides])
def test_logits_and_gradients(name, side, device):
    mask = padding(side, device)
    assert_within_budget(name, dict(input_ids=tokens(device), attention_mask=mask), device, mask=mask)


@parametrize("name", [*DECODERS, "bert"])
def test_bf16(name, device):
    mask = padding("left", device)
    assert_within_budget(name, dict(input_ids=tokens(device), attention_mask=mask), device, torch.bfloat16, mask=mask)


def sounds(device, dtype=torch.float32):
    return torch.randn(BATCH, 8, 24, generator=torch.Generator().manual_seed(3)).to(device, dtype)


@parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cross_attention_of_whisper(dtype, device):
    mask = padding("right", device)
    inputs = dict(input_features=sounds(device, dtype), decoder_input_ids=tokens(device), decoder_attention_mask=mask)
    assert_within_budget("whisper", inputs, device, dtype, mask=mask)


@parametrize("side", ["none", "right"])
def test_t5_without_gradients(side, device):
    """Its learned bias goes to the kernel as a mask: right for inference, refused for training."""
    mask = padding(side, device)
    inputs = dict(input_ids=tokens(device), attention_mask=mask, decoder_input_ids=tokens(device, seqlen=9))
    first = make_model("t5", "eager", device=device)
    with torch.no_grad():
        truth = make_model("t5", "exact", first, torch.float64, device)(**inputs).logits
        own = [make_model("t5", name, first, device=device)(**inputs).logits for name in ("eager", "sdpa")]
        actual = make_model("t5", "flashattn", first, device=device)(**inputs).logits
    allowed = 2 * max(max_error(x, truth) for x in own) + torch.finfo(torch.float32).eps * truth.abs().max().item()
    assert max_error(actual, truth) <= allowed
    with pytest.raises(NotImplementedError, match=r"`position_bias` must not require grad in flashattn: .*no_grad"):
        make_model("t5", "flashattn", first, device=device)(**inputs)


@parametrize("name, side", [("llama", "none"), *((name, "left") for name in DECODERS)])
def test_generate(name, side, device):
    """The same greedy tokens as transformers' own, past the window, with a cache and one-token steps."""
    mask = torch.ones_like(tokens(device)) if side == "none" else padding(side, device)
    other = yardsticks(name)[-1]
    models = {other: make_model(name, other, device=device)}
    models["flashattn"] = make_model(name, "flashattn", models[other], device=device)
    options = dict(input_ids=tokens(device), attention_mask=mask, max_new_tokens=6, do_sample=False)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    expected, actual = (model.generate(**options) for model in models.values())
    assert torch.equal(actual.sequences, expected.sequences)
    assert len(set(actual.sequences[0, SEQLEN:].tolist())) > 1  # not one token over and over
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_generate_with_whisper_and_t5(device):
    for name, inputs in (
        ("whisper", dict(input_features=sounds(device), decoder_input_ids=tokens(device, seqlen=3))),
        ("t5", dict(input_ids=tokens(device), attention_mask=padding("right", device))),
    ):
        sdpa = make_model(name, "sdpa", device=device)
        flash = make_model(name, "flashattn", sdpa, device=device)
        expected, actual = (model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in (sdpa, flash))
        assert torch.equal(actual, expected), name


@parametrize("name", ["llama", "mistral"])
def test_a_turn_on_top_of_a_cache(name, device):
    """Several queries over more keys, with padding inside what the cache holds: a chat's second turn."""
    first, second = tokens(device), tokens(device, seqlen=5)
    mask = torch.cat((padding("right", device), torch.ones_like(second)), dim=1)
    logits = {}
    eager = make_model(name, "eager", device=device)
    for implementation in ("eager", "flashattn"):
        model = make_model(name, implementation, eager, device=device)
        with torch.no_grad():
            cache = model(input_ids=first, attention_mask=mask[:, :SEQLEN], use_cache=True).past_key_values
            logits[implementation] = model(input_ids=second, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits["flashattn"], logits["eager"], rtol=1e-4, atol=1e-4)


def test_static_cache(device):
    """It has room behind the last query, which nobody may see."""
    sdpa = make_model("llama", "sdpa", device=device)
    flash = make_model("llama", "flashattn", sdpa, device=device)
    options = dict(
        input_ids=tokens(device), attention_mask=padding("left", device), max_new_tokens=5, do_sample=False,
        cache_implementation="static", disable_compile=True,
    )  # fmt: skip
    assert torch.equal(flash.generate(**options), sdpa.generate(**options))


@parametrize("name", ["llama", "mistral"])
def test_packed_position_ids(name, device):
    """Positions that begin again begin a new sequence, as in SDPA."""
    positions = torch.tensor([[*range(6), *range(8)]], device=device)
    inputs = dict(input_ids=tokens(device, batch=1), position_ids=positions)
    assert_within_budget(name, inputs, device)
    model = make_model(name, "flashattn", device=device)
    alone = model(input_ids=inputs["input_ids"][:, :6]).logits
    torch.testing.assert_close(model(**inputs).logits[:, :6], alone, rtol=1e-4, atol=1e-4)


@parametrize("with_positions", [True, False], ids=["positions too", "offsets alone"])
def test_packed_offsets(with_positions, device):
    """What transformers' flattening collator passes: offsets of the sequences in a batch of one."""
    model = make_model("llama", "flashattn", device=device)
    ids, offsets = tokens(device, batch=1), torch.tensor([0, 6, SEQLEN], dtype=torch.int32, device=device)
    inputs = dict(input_ids=ids, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=8, max_length_k=8)
    if with_positions:
        inputs["position_ids"] = torch.tensor([[*range(6), *range(8)]], device=device)
    logits = model(**inputs).logits
    for begin, end in ((0, 6), (6, SEQLEN)):  # rotary positions are relative, so that a sequence alone is the same
        torch.testing.assert_close(
            logits[:, begin:end], model(input_ids=ids[:, begin:end]).logits, rtol=1e-4, atol=1e-4
        )
    with pytest.raises(NotImplementedError, match=r"`cu_seq_lens_q` must be None with a padding mask"):
        model(**inputs | dict(position_ids=None, attention_mask=torch.arange(SEQLEN, device=device)[None] > 1))
    with pytest.raises(ValueError, match=r"`cu_seq_lens_q` must come with a batch of 1, got 2"):
        model(**inputs | dict(position_ids=None, input_ids=tokens(device)))


@parametrize("kind", ["boolean", "additive"])
@parametrize("name", ["llama", "gemma2"])
def test_custom_4d_mask(name, kind, device):
    """It is the whole truth: here each token sees itself and every second one, later ones too."""
    n = SEQLEN
    visible = (torch.arange(n)[:, None] - torch.arange(n)[None]) % 2 == 0
    visible = visible.to(device)[None, None]
    additive = torch.zeros(1, 1, n, n, device=device).masked_fill(~visible, torch.finfo(torch.float32).min)
    masks = {kind: visible if kind == "boolean" else additive}
    eager = make_model(name, "eager", device=device)
    flash = make_model(name, "flashattn", eager, device=device)
    masks = {key: dict(full_attention=x, sliding_attention=x) if name == "gemma2" else x for key, x in masks.items()}
    truth = dict(full_attention=additive, sliding_attention=additive) if name == "gemma2" else additive
    expected = eager(input_ids=tokens(device), attention_mask=truth).logits
    actual = flash(input_ids=tokens(device), attention_mask=masks[kind]).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_made_an_encoder(device):
    """With is_causal=False in its config a decoder looks both ways, as it does in eager attention."""
    for side in ("none", "left"):
        mask = padding(side, device)
        eager = make_model("llama", "eager", device=device, is_causal=False)
        flash = make_model("llama", "flashattn", eager, device=device, is_causal=False)
        expected, actual = (m(input_ids=tokens(device), attention_mask=mask).logits for m in (eager, flash))
        kept = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(actual[kept], expected[kept], rtol=1e-4, atol=1e-4)
        causal = make_model("llama", "flashattn", eager, device=device)(input_ids=tokens(device)).logits
        assert (causal[0] - actual[0]).abs().max() > 1e-2


def test_a_row_of_padding_only(device):
    mask = padding("left", device)
    mask[1] = 0
    model = make_model("llama", "flashattn", device=device)
    logits = model(input_ids=tokens(device), attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[0], model(input_ids=tokens(device)[:1]).logits[0], rtol=1e-4, atol=1e-4)


@parametrize("side", ["none", "left"])
def test_what_the_mask_function_returns(side, device):
    """Nothing of the size of the scores where the kernels know the pattern: that is the point of them."""
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return query.transpose(1, 2), None

    integration.AttentionInterface.register("flashattn", spy)
    try:
        for name in [*DECODERS, "bert"]:
            make_model(name, "flashattn", device=device)(input_ids=tokens(device), attention_mask=padding(side, device))
    finally:
        integration.AttentionInterface.register("flashattn", integration.flashattn_attention)
    assert len(seen) == 4 + 2  # layers
    if side == "none":
        assert all(mask is None for mask in seen)
    else:
        assert all(mask.shape == (BATCH, SEQLEN) and mask.dtype == torch.bool for mask in seen)


def test_a_window_is_not_packed_across_a_gap(device):
    fits = integration.sliding_window_causal_mask_function(5)
    options = dict(batch_size=BATCH, q_length=SEQLEN, kv_length=SEQLEN, mask_function=fits, local_size=5, device=device)
    assert integration.flashattn_mask(attention_mask=padding("left", device).bool(), **options).dim() == 2
    assert integration.flashattn_mask(attention_mask=padding("inside", device).bool(), **options).dim() == 4
    # A mask of another kind is not mistaken for the window it was made of.
    other = integration.sliding_window_causal_mask_function(6)
    assert integration.flashattn_mask(**options | dict(mask_function=other)).shape == (BATCH, 1, SEQLEN, SEQLEN)


def test_compiled(device):
    """A training step in one graph; the padding mask goes through as it is."""
    model = make_model("llama", "flashattn", device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for side in ("none", "left"):
        inputs = dict(input_ids=tokens(device), attention_mask=padding(side, device), use_cache=False)
        kept = slice(None) if side == "none" else inputs["attention_mask"].bool()
        torch.testing.assert_close(compiled(**inputs).logits[kept], model(**inputs).logits[kept], rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing(device):
    model = make_model("llama", "flashattn", device=device).train()
    mask = padding("left", device)
    inputs = dict(input_ids=tokens(device), attention_mask=mask, use_cache=False)
    expected = run(model, inputs, mask)
    model.gradient_checkpointing_enable()
    actual = run(model, inputs, mask)
    assert all(torch.equal(actual[name], x) for name, x in expected.items())


def test_dropout_is_refused(device):
    model = make_model("llama", "flashattn", device=device, attention_dropout=0.1)
    model(input_ids=tokens(device))  # in evaluation there is none
    with pytest.raises(NotImplementedError, match=r"`dropout` must be 0 in flashattn, got 0.1: set .*attn_pdrop.*sdpa"):
        model.train()(input_ids=tokens(device))


def test_attention_weights_are_refused(device):
    for name in ("llama", "bert"):
        with pytest.raises(NotImplementedError, match=r"`output_attentions` must be False in flashattn.*use eager"):
            make_model(name, "flashattn", device=device)(input_ids=tokens(device), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        make_model("llama", "flashattn", device=device).config.output_attentions = True


class Layer(torch.nn.Module):
    """A layer as a model outside transformers might write it."""

    def __init__(self, is_causal=True, **config):
        super().__init__()
        self.is_causal, self.config = is_causal, transformers.PretrainedConfig(**config)


@parametrize("name", integration.REFUSED)
def test_what_the_kernels_lack_is_refused(name, device):
    q, k, v = torch.zeros(3, 1, 2, 4, 16, device=device)
    with pytest.raises(NotImplementedError, match=f"`{name}` must be None in flashattn, got Tensor: use eager"):
        integration.flashattn_attention(Layer(), q, k, v, None, **{name: torch.zeros(2, device=device)})


def test_a_window_that_is_not_said_is_refused(device):
    q, k, v = torch.zeros(3, 1, 2, 4, 16, device=device)
    with pytest.raises(NotImplementedError, match=r"`sliding_window` must be passed to flashattn .* Layer does not"):
        integration.flashattn_attention(Layer(sliding_window=4), q, k, v, None)
    with pytest.raises(NotImplementedError, match=r"`sliding_window` must be None in flashattn .* got 4"):
        integration.flashattn_attention(Layer(is_causal=False), q, k, v, None, sliding_window=4)


def test_other_implementations_still_load():
    """The one place in transformers that is wrapped passes every name but ours on."""
    wrapped = transformers.modeling_utils.lazy_import_flash_attention
    assert wrapped("flashattn") is None
    with pytest.raises((ImportError, ValueError)):
        wrapped("flash_attention_without_a_package")
    integration._register()
    assert transformers.modeling_utils.lazy_import_flash_attention is wrapped


# Keys in pages


def paged(model, n_pages=30, **options):
    return integration.PagedCache.for_model(model, n_pages, page_size=16, **options)


def decodes(monkeypatch):
    """Return the list that will hold the number of tokens of each call of flash_decode."""
    from flashattn import paged as module

    seen, call = [], module.flash_decode
    monkeypatch.setattr(
        module, "flash_decode", lambda q, *args, **options: seen.append(q.shape[2]) or call(q, *args, **options)
    )
    return seen


@parametrize("name, side", [("llama", "none"), *((name, "left") for name in DECODERS)])
def test_generate_from_pages(name, side, device, monkeypatch):
    """The same greedy tokens as with transformers' own cache and attention; steps of one token run on the pages."""
    mask = torch.ones_like(tokens(device)) if side == "none" else padding(side, device)
    other = yardsticks(name)[-1]
    models = {other: make_model(name, other, device=device)}
    models["flashattn"] = make_model(name, "flashattn", models[other], device=device)
    options = dict(input_ids=tokens(device), attention_mask=mask, max_new_tokens=6, do_sample=False)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    expected = models[other].generate(**options)
    contiguous = models["flashattn"].generate(**options)
    seen = decodes(monkeypatch)
    cache = paged(models["flashattn"])
    actual = models["flashattn"].generate(**options, past_key_values=cache)
    assert torch.equal(actual.sequences, expected.sequences) and torch.equal(actual.sequences, contiguous.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    n_layers = cache.pages.n_layers
    assert seen == [1] * (5 * n_layers)
    n_padded = int((1 - mask).sum())
    assert sum(map(cache.pages.length, cache.sequences)) == BATCH * (SEQLEN + 5) - n_padded  # padding is not stored
    cache.reset()
    assert cache.pages.n_free == 30


def test_beams_and_answers_share_pages(device):
    sdpa = make_model("llama", "sdpa", device=device)
    flash = make_model("llama", "flashattn", sdpa, device=device)
    options = dict(input_ids=tokens(device), attention_mask=padding("left", device), max_new_tokens=6, do_sample=False)
    beams = options | dict(num_beams=3)
    cache = paged(flash)
    assert torch.equal(flash.generate(**beams, past_key_values=cache), sdpa.generate(**beams))
    assert cache.batch_size == 6
    usage = cache.pages.usage()
    assert usage.used_bytes < usage.logical_bytes


def test_a_prompt_is_read_once_and_forked(device, monkeypatch):
    """Two questions behind one prompt, in its pages."""
    model = make_model("llama", "flashattn", device=device)
    prompt, questions = tokens(device, batch=1), tokens(device, seqlen=5)
    first = paged(model)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=first)
        free = first.pages.n_free
        caches = [first.fork(), first.fork()]
        assert first.pages.n_free == free
        seen = decodes(monkeypatch)
        for question, cache in zip(questions, caches, strict=True):
            actual = model(input_ids=question[None], past_key_values=cache).logits
            whole = model(input_ids=torch.cat((prompt, question[None]), 1), use_cache=False).logits
            torch.testing.assert_close(actual, whole[:, SEQLEN:], rtol=1e-4, atol=1e-4)
    assert seen == [5, 5]  # several tokens at once are decoded, too


@parametrize("name", ["llama", "mistral"])
@parametrize("side, n_new", [("none", 5), ("none", 20), ("left", 20)])
def test_a_turn_on_top_of_pages(name, side, n_new, device):
    """Short turns are decoded; for long ones the keys are gathered, padding again in its place."""
    first, second = tokens(device), tokens(device, seqlen=n_new)
    mask = padding(side, device)
    mask = torch.ones_like(first) if mask is None else mask
    both = torch.cat((mask, torch.ones_like(second)), dim=1)
    eager = make_model(name, "eager", device=device)
    flash = make_model(name, "flashattn", eager, device=device)
    with torch.no_grad():
        truth = eager(input_ids=torch.cat((first, second), 1), attention_mask=both, use_cache=False).logits[:, SEQLEN:]
        cache = paged(flash)
        flash(input_ids=first, attention_mask=mask, past_key_values=cache)
        actual = flash(input_ids=second, attention_mask=both, past_key_values=cache).logits
        if side == "left":
            assert cache.pages.length(cache.sequences[1]) == SEQLEN + n_new - 5
    torch.testing.assert_close(actual, truth, rtol=1e-4, atol=1e-4)


def test_padding_within_a_turn(device):
    """A second turn of different lengths, padded on the right: neither decoded nor stored where it is padding."""
    first, second = tokens(device), tokens(device, seqlen=5)
    mask = torch.ones(BATCH, SEQLEN + 5, dtype=torch.long, device=device)
    mask[1, -2:] = 0
    eager = make_model("llama", "eager", device=device)
    flash = make_model("llama", "flashattn", eager, device=device)
    with torch.no_grad():
        truth = eager(input_ids=torch.cat((first, second), 1), attention_mask=mask, use_cache=False).logits[:, SEQLEN:]
        cache = paged(flash)
        flash(input_ids=first, past_key_values=cache)
        actual = flash(input_ids=second, attention_mask=mask, past_key_values=cache).logits
    kept = mask[:, SEQLEN:].bool()
    torch.testing.assert_close(actual[kept], truth[kept], rtol=1e-4, atol=1e-4)
    assert [*map(cache.pages.length, cache.sequences)] == [SEQLEN + 5, SEQLEN + 3]
    with pytest.raises(
        NotImplementedError, match=r"`tokens_to_remove` must not reach tokens with padding .* 0 at most"
    ):
        cache.crop(-1)


def test_crop(device):
    """Tokens that a draft proposed and the model refused are forgotten, and their pages are free."""
    model = make_model("llama", "flashattn", device=device)
    ids = tokens(device, seqlen=20)
    cache = paged(model)
    with torch.no_grad():
        model(input_ids=ids[:, :12], past_key_values=cache)
        free = cache.pages.n_free
        model(input_ids=ids[:, 4:12], past_key_values=cache)
        cache.crop(-8)
        assert cache.pages.n_free == free and cache.get_seq_length() == 12
        actual = model(input_ids=ids[:, 12:], past_key_values=cache).logits
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(actual, whole[:, 12:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="`tokens_to_remove` must be 0 or negative, got 3"):
        cache.crop(3)


def test_guessed_tokens_are_checked_in_one_step(device, monkeypatch):
    """The prompt is a draft: several of its tokens are guessed, which one call of flash_decode checks; those refused are cropped."""
    model = make_model("llama", "flashattn", device=device)
    ids = tokens(device, batch=1).repeat(1, 2)
    options = dict(input_ids=ids, max_new_tokens=8, do_sample=False)
    expected = model.generate(**options)
    seen = decodes(monkeypatch)
    cache = paged(model)
    assert torch.equal(model.generate(**options, prompt_lookup_num_tokens=3, past_key_values=cache), expected)
    assert max(seen) > 1
    assert cache.pages.length(cache.sequences[0]) == cache.get_seq_length()


def test_out_of_pages(device):
    """Nothing is lost: the batch goes on once there is room again."""
    model = make_model("llama", "flashattn", device=device)
    ids = tokens(device, batch=1, seqlen=40)
    cache = paged(model, 3)
    other = cache.pages.allocate()
    cache.pages.reserve([other], 20)
    with torch.no_grad():
        with pytest.raises(OutOfPages, match="2 pages are needed and 1 are free"):
            model(input_ids=ids[:, :20], past_key_values=cache)
        assert cache.pages.n_free == 1 and cache.get_seq_length() == 0
        model(input_ids=ids[:, :10], past_key_values=cache)
        with pytest.raises(OutOfPages):
            model(input_ids=ids[:, 10:], past_key_values=cache)
        cache.pages.free(other)
        actual = model(input_ids=ids[:, 10:], past_key_values=cache).logits
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(actual, whole[:, 10:], rtol=1e-4, atol=1e-4)


def test_fp8_cache(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    model = make_model("llama", "flashattn", device=device)
    ids = tokens(device)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).logits[:, -1:]
        cache = paged(model, dtype=torch.float8_e4m3fn, k_scale=0.05, v_scale=0.05)
        model(input_ids=ids[:, :-1], past_key_values=cache)
        rounded = model(input_ids=ids[:, -1:], past_key_values=cache).logits
    assert 0 < (rounded - exact).abs().max() < 0.1 * exact.abs().max()


def test_what_a_paged_cache_refuses(device):
    sdpa = make_model("llama", "sdpa", device=device)
    ids = tokens(device)
    with pytest.raises(NotImplementedError, match="a PagedCache needs attn_implementation='flashattn'"):
        sdpa(input_ids=ids, past_key_values=paged(sdpa))
    with pytest.raises(NotImplementedError, match="a PagedCache needs attn_implementation='flashattn'"):
        make_model("llama", "eager", device=device)(input_ids=ids, past_key_values=paged(sdpa))
    model = make_model("llama", "flashattn", sdpa, device=device)
    with pytest.raises(TypeError, match=r"`pages` must be a flashattn.PagedKVCache, got int"):
        integration.PagedCache(3)
    whole = torch.ones(BATCH, 1, SEQLEN, SEQLEN, dtype=torch.bool, device=device).tril()
    with pytest.raises(
        NotImplementedError,
        match=r"`attention_mask` must be about padding alone with a PagedCache, .* \(2, 1, 14, 14\)",
    ):
        model(input_ids=ids, attention_mask=whole, past_key_values=paged(model))
    with torch.no_grad():
        cache = paged(model)
        model(input_ids=ids, attention_mask=padding("left", device), past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"`attention_mask` must show the tokens in the PagedCache, \[15, 10\] .*, got \[15, 15\]"
        ):
            model(input_ids=ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"`input_ids` must have batch 2 like the PagedCache, got 1"):
            model(input_ids=ids[:1], past_key_values=cache)
    offsets = torch.tensor([0, SEQLEN], dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="`cu_seq_lens_q` must be None with a PagedCache"):
        model(input_ids=ids[:1], cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, past_key_values=paged(model))
