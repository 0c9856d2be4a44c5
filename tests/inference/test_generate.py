"""Generated text follows the one-device reference, which computes every position anew: on any mesh, in any company."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.generation_cases import PROMPTS, build, configs, recorded_logits, reference_of
from support.marks import slow_but

from moe_jax.data.corpus import DataConfig
from moe_jax.data.tokenizer import build_tokenizer
from moe_jax.errors import UserError
from moe_jax.inference import Generator, Sampling, programs
from moe_jax.inference.programs import choose_tokens, prompt_keys

GREEDY = Sampling(temperature=0)
SWIGLU = {"activation": "swiglu", "positions": "rotary", "moe_every": 1}
PLAIN = {"norm": "rms", "attention_bias": False, "ffn_bias": False, "tied_head": False, **SWIGLU}
QWEN = {**PLAIN, "kv_heads": 2, "head_dim": 6, "qk_norm": "head", "moe_every": 2}
OLMOE = {**PLAIN, "qk_norm": "width", "rotary_base": 1e6, "rotary_factor": 4.0}
LATENT = {**PLAIN, "kv_lora_rank": 6, "q_lora_rank": 7, "qk_rope_head_dim": 4, "head_dim": 10, "v_head_dim": 5}
YARN = {"rotary_factor": 40.0, "rotary_base": 500.0, "rotary_yarn": (16, 8, 1, 0.7, 1.0)}
# name: (mesh, changes of the model, of the layer)
CASES = {
    "1 device": ({"expert": 1}, {}, {}),
    "EP x ESP x MP": ({"expert": 2, "expert_shard": 2, "model": 2, "data": 2}, QWEN, {"capacity_factor": 1.0}),
    "EP 4, MP 4, s2": ({"expert": 4, "expert_shard": 2, "model": 4}, OLMOE, {"schedule": "s2", "shared_experts": 1}),
    "EP 8": ({"expert": 8}, SWIGLU, {"schedule": "s1", "router": "sigmoid_bias"}),
    "EP 3": ({"expert": 3}, {"layers": 4}, {}),  # experts that the devices cannot share evenly
    "EP 2": ({"expert": 2}, {}, {"schedule": "pairwise"}),
    "in MP 4": ({"expert": 2, "expert_shard": 2, "model": 4}, SWIGLU, {"schedule": "s1"}),
    "MP 4": ({"expert": 2, "data": 2, "model": 4}, {}, {"schedule": "ring", "top_k": 3}),
    "ESP 4": ({"expert_shard": 4, "expert": 1}, SWIGLU, {"schedule": "deepspeed", "router": "switch", "top_k": 1}),
    "coordinated": ({"expert": 4, "expert_shard": 2, "model": 2}, QWEN, {"schedule": "s1", "transport": "coordinated"}),
    "latent": ({"expert": 1}, {**LATENT, **YARN}, {}),
    "latent, MP 2": ({"expert": 2, "expert_shard": 2, "model": 2, "data": 2}, LATENT, {"schedule": "s2"}),
    "two_level": ({"expert": 4, "model": 2, "devices_per_node": 2}, {}, {"schedule": "s1", "transport": "two_level"}),
}
AS_GPU = ("1 device", "in MP 4", "latent")  # single tokens meet their experts as on a GPU


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", slow_but(CASES, "1 device", "EP 3", "EP x ESP x MP", "in MP 4", "latent, MP 2"))
def test_greedy_text_and_logits_equal_the_reference(case, float64, monkeypatch):
    """Ragged prompts, fewer than devices; logits of prefill and of every decoded token to 1e-10."""
    mesh, changes, layer = CASES[case]
    layer = {"gate_noise": 0.1, **layer} if layer.get("router") != "sigmoid_bias" else {"gate_noise": 0.0, **layer}
    config, moe = configs(layer, **changes)
    if case in AS_GPU:
        monkeypatch.setattr(programs, "on_cpu", lambda roles: False)
    run_few = mock.Mock(side_effect=programs.run_few)
    monkeypatch.setattr(programs, "run_few", run_few)
    generator, params = build(config, moe, mesh, end_ids=())
    logits = recorded_logits(generator)
    found = generator.generate(PROMPTS, 6, GREEDY, experts=True)
    assert [len(new) for new in found.token_ids] == [6, 6, 6] and set(found.stopped) == {"max_new_tokens"}
    assert run_few.called == (case in AS_GPU)
    if "router" in layer:
        one, _ = build(config, moe, {"expert": 1}, end_ids=())  # the reference routes by topk
        assert found.token_ids == one.generate(PROMPTS, 6, GREEDY).token_ids
        return
    for row, (prompt, new) in enumerate(zip(PROMPTS, found.token_ids, strict=True)):
        want = reference_of(params, config, moe, prompt, new)
        np.testing.assert_array_equal(np.argmax(want, axis=-1), new)
        got = jax.nn.log_softmax(np.stack([step[row] for step in logits[:6]]), axis=-1)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
        assert found.experts[row].shape == (len(prompt) + 5, config.moe_layers, moe.top_k)
        assert (found.experts[row] >= 0).all()


def test_text_does_not_depend_on_its_company_and_ends(float64):
    """Draws of a prompt are equal alone and in a batch, on one device and on four; an end stops only its own prompt."""
    config, moe = configs()
    one, _ = build(config, moe, {"expert": 1})
    four, _ = build(config, moe, {"expert": 2, "expert_shard": 2, "model": 2})
    drawn = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=3)
    alone = [one.generate([prompt], 7, drawn).token_ids[0] for prompt in PROMPTS]
    *together, again = one.generate([*PROMPTS, PROMPTS[0]], 7, drawn).token_ids
    assert together == alone == four.generate(PROMPTS, 7, drawn).token_ids
    assert again != alone[0]  # the second of two equal prompts has draws of its own
    assert one.generate([PROMPTS[0]], 7, dataclasses.replace(drawn, seed=4)).token_ids[0] != alone[0]

    end = alone[1][2]
    one.end_ids = (end,)
    ended = one.generate(PROMPTS, 7, drawn)
    for whole, new, stopped in zip(alone, ended.token_ids, ended.stopped, strict=True):
        cut = whole[: whole.index(end) + 1] if end in whole else whole
        assert (new, stopped) == (cut, "end" if end in whole else "max_new_tokens")
    assert one.generate(PROMPTS, 7, drawn, ignore_eos=True).token_ids == alone
    # rounded sizes are shared: programs of 1 and of 4 rows
    wanted = [(rows, *sizes, (False, 20, True)) for rows in (1, 4) for sizes in ((1, 0), (16, 16))]
    assert all(one.program(*sizes) for sizes in wanted) and one.program.cache_info().currsize == len(wanted)
    # the model has 32 positions, and the last token needs none
    full = one.generate([list(range(1, 31)), [1]], 7, drawn, ignore_eos=True)
    assert [len(new) for new in full.token_ids] == [3, 7] and full.stopped == ["max_length", "max_new_tokens"]
    assert one.program(2, 32, 32, (False, 20, True)) and one.program.cache_info().currsize == len(wanted) + 2
    with pytest.raises(UserError, match="no tokenizer"):
        one.generate("text", 1)


@pytest.mark.parametrize("strips", [True, False])
def test_text_goes_on_where_the_prompt_ends(strips, tmp_path):
    """By decoders of SentencePiece, which drop a text's first space, and with characters of bytes, cut anywhere."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    words = ["<unk>", "<s>", "▁Once", "▁upon", "▁a", *(f"<0x{byte:02X}>" for byte in "日".encode())]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([(word, -1.0) for word in words], 0, byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts if strips else [decoders.ByteFallback(), decoders.Metaspace()])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    config = DataConfig(tokenizer=str(tmp_path / "tokenizer.json"))
    generator = object.__new__(Generator)  # without a model: the new ids are given
    generator.longest, generator.end_ids, generator.vocabulary = None, (8,), 9
    for generator.tokenizer in map(build_tokenizer, (config, dataclasses.replace(config, add_special_tokens=False))):
        for prompt, new, text in (
            ("Once", [3, 4], " upon a"),
            ("Once upon", [4, 5, 6, 7, 3], " a日 upon"),
            ([2, 5], [6, 7, 3], "日 upon"),
            ([2, 5, 6, 7], [5], "\ufffd"),
            ([3], [2, 8], " Once"),
        ):
            generator._run = lambda *_, new=new: ([new], None, np.zeros(1))
            assert generator.generate([prompt], 9).text == [text]


def test_choose_tokens_keeps_what_top_k_and_top_p_leave():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]] * 4000))
    keys = jnp.asarray(prompt_keys([[1]] * 4000, 0))
    places = jnp.zeros(4000, jnp.int32)

    def shares(temperature=1.0, top_k=0, top_p=1.0):
        greedy, kept, cuts = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).compiled
        scale, share = None if greedy else jnp.float32(temperature), jnp.float32(top_p) if cuts else None
        ids = choose_tokens(logits, keys, places, kept, scale, share)
        return np.bincount(np.asarray(ids), minlength=4) / 4000

    close = {"rtol": 0, "atol": 0.03}  # three standard deviations of 4000 draws are 0.024
    np.testing.assert_allclose(shares(), [0.5, 0.3, 0.15, 0.05], **close)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0.375, 0, 0], **close)
    np.testing.assert_allclose(shares(top_p=0.8), [0.625, 0.375, 0, 0], **close)
    np.testing.assert_allclose(shares(top_p=0.81), [0.526, 0.316, 0.158, 0], **close)
    np.testing.assert_allclose(shares(top_k=3, top_p=0.5), [1, 0, 0, 0], **close)
    np.testing.assert_allclose(shares(temperature=0.5), [0.685, 0.247, 0.062, 0.007], **close)
    np.testing.assert_array_equal(shares(temperature=0), [1, 0, 0, 0])
