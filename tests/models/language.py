"""Language models of `transformers`, tiny and random: decoders, encoders, encoder-decoders."""

from __future__ import annotations

from functools import partial, partialmethod
from typing import Any

import torch
import transformers as hf
from transformers.models.reformer import modeling_reformer

from tests.models.entry import (
    UNCHECKPOINTED,
    VOCAB,
    WIDTH,
    Batch,
    Entry,
    classes_batch,
    language_batch,
    long_batch,
    prompt,
    seq2seq_batch,
    tokens,
)

Options = dict[str, Any]
# What nearly every configuration calls these; the rest is spelt out at the model.
SHAPE: Options = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SPECIAL: Options = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER: Options = {**SHAPE, **SPECIAL, "vocab_size": VOCAB}
DROPOUT: Options = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ENCODER: Options = {**DECODER, **DROPOUT, "max_position_embeddings": 40}
GROUPED: Options = {**DECODER, "num_key_value_heads": 2, "attention_dropout": 0.1}
# Mixtures of experts, by the two names their number goes under.
LOCAL_EXPERTS: Options = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS: Options = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}


def decoder(name: str, model: Any, config: Any, **options: Any) -> Entry:
    return Entry(name, lambda: model(config(**options)), language_batch, prompt)


def encoder(name: str, model: Any, config: Any, **options: Any) -> Entry:
    return Entry(name, lambda: model(config(**options)), language_batch)


def deepseek() -> Any:
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(
        **DECODER, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ))  # fmt: skip


def qwen3_next() -> Any:
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(
        **EXPERTS, head_dim=8, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    ))  # fmt: skip


def reformer() -> Any:
    # theirs take the seeds that repeat dropout in the backward pass from the clock
    layer: Any = modeling_reformer.ReformerLayer
    layer._init_attention_seed = partialmethod(_draw_seed, name="attention_seed")
    layer._init_feed_forward_seed = partialmethod(_draw_seed, name="feed_forward_seed")
    return hf.ReformerModelWithLMHead(hf.ReformerConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, attn_layers=["local", "lsh"], attention_head_size=8,
        num_attention_heads=4, axial_pos_shape=[4, 5], axial_pos_embds_dim=[16, 16], hash_seed=3,
        feed_forward_size=48, lsh_attn_chunk_length=5, local_attn_chunk_length=5, num_hashes=1,
        num_buckets=2, is_decoder=True, eos_token_id=2, pad_token_id=0,
    ))  # fmt: skip


def _draw_seed(layer: Any, name: str) -> None:
    setattr(layer, name, int(torch.randint(1 << 30, ())))
    torch.manual_seed(getattr(layer, name))


def big_bird() -> Any:
    options = ENCODER | {"max_position_embeddings": 128}
    return hf.BigBirdForMaskedLM(hf.BigBirdConfig(
        **options, block_size=4, num_random_blocks=2, attention_type="block_sparse",
    ))  # fmt: skip


T5: Options = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


BART: Options = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip


def bart() -> Any:
    # layer drop: whole layers are left out, by Python's choice
    return hf.BartForConditionalGeneration(
        hf.BartConfig(**BART, max_position_embeddings=40, encoder_layerdrop=0.3)
    )


def led() -> Any:
    return hf.LEDForConditionalGeneration(hf.LEDConfig(
        **BART, max_encoder_position_embeddings=40, max_decoder_position_embeddings=40,
        attention_window=4,
    ))  # fmt: skip


def perceiver() -> Any:
    return hf.PerceiverForSequenceClassification(hf.PerceiverConfig(
        num_latents=6, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=VOCAB,
        max_position_embeddings=40,
    ))  # fmt: skip


def perceiver_batch() -> Batch:
    return {"inputs": tokens(), "attention_mask": torch.ones(2, 10), "labels": torch.tensor([0, 1])}


GPT2: Options = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 40}
DISTILBERT: Options = {
    "vocab_size": VOCAB,
    "dim": WIDTH,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
}
XLNET: Options = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48}
FUNNEL: Options = {"vocab_size": VOCAB, "block_sizes": [1, 1], "d_model": WIDTH, "n_head": 4,
                   "d_head": 8, "d_inner": 48}  # fmt: skip
RECURRENT: Options = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2,
             "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip

DECODERS = [
    decoder("llama", hf.LlamaForCausalLM, hf.LlamaConfig, **GROUPED),
    decoder("gpt2", hf.GPT2LMHeadModel, hf.GPT2Config, **GPT2, **SPECIAL),
    decoder("qwen3", hf.Qwen3ForCausalLM, hf.Qwen3Config, **GROUPED, head_dim=8),
    decoder("mixtral", hf.MixtralForCausalLM, hf.MixtralConfig, **LOCAL_EXPERTS),
    decoder("mamba", hf.MambaForCausalLM, hf.MambaConfig, **RECURRENT, state_size=4),
    decoder("gemma3", hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, **GROUPED, head_dim=8,
            sliding_window=4),
    decoder("falcon", hf.FalconForCausalLM, hf.FalconConfig, **DECODER, hidden_dropout=0.1,
            attention_dropout=0.1),
    Entry("deepseek", deepseek, language_batch, prompt),
    decoder("gpt_oss", hf.GptOssForCausalLM, hf.GptOssConfig, **LOCAL_EXPERTS, head_dim=8,
            sliding_window=4),
    decoder("mamba2", hf.Mamba2ForCausalLM, hf.Mamba2Config, **RECURRENT, state_size=4,
            num_heads=4, head_dim=16, n_groups=1, chunk_size=4),
    Entry("qwen3_next", qwen3_next, language_batch, prompt),
    decoder("jamba", hf.JambaForCausalLM, hf.JambaConfig, **EXPERTS, use_mamba_kernels=False,
            attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1, mamba_d_state=4),
    decoder("recurrent_gemma", hf.RecurrentGemmaForCausalLM, hf.RecurrentGemmaConfig,
            **{**DECODER, "num_hidden_layers": 3}, lru_width=WIDTH, attention_window_size=4),
    decoder("bloom", hf.BloomForCausalLM, hf.BloomConfig, vocab_size=VOCAB, hidden_size=WIDTH,
            n_layer=2, n_head=4, hidden_dropout=0.1, attention_dropout=0.1, **SPECIAL),
    decoder("olmoe", hf.OlmoeForCausalLM, hf.OlmoeConfig, **EXPERTS),
    decoder("phi3", hf.Phi3ForCausalLM, hf.Phi3Config, **GROUPED),
    encoder("rwkv", hf.RwkvForCausalLM, hf.RwkvConfig, **RECURRENT, attention_hidden_size=WIDTH,
            intermediate_size=48),
    Entry("reformer", reformer, partial(long_batch, 20), lacks=UNCHECKPOINTED),
]  # fmt: skip
ENCODERS = [
    encoder("bert", hf.BertForMaskedLM, hf.BertConfig, **ENCODER),
    Entry("distilbert", lambda: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(**DISTILBERT, max_position_embeddings=40)), classes_batch),
    encoder("modernbert", hf.ModernBertForMaskedLM, hf.ModernBertConfig, **DECODER,
            local_attention=4, global_attn_every_n_layers=2, embedding_dropout=0.1),
    encoder("deberta", hf.DebertaV2ForMaskedLM, hf.DebertaV2Config, **ENCODER,
            relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    encoder("longformer", hf.LongformerForMaskedLM, hf.LongformerConfig, **ENCODER,
            attention_window=[4, 4]),
    Entry("big_bird", big_bird, partial(long_batch, 64), lacks=frozenset({"autocast"})),
    Entry("xlnet", lambda: hf.XLNetLMHeadModel(hf.XLNetConfig(**XLNET)), language_batch,
          lacks=UNCHECKPOINTED),
    Entry("funnel", lambda: hf.FunnelForMaskedLM(hf.FunnelConfig(**FUNNEL)), language_batch,
          lacks=UNCHECKPOINTED),
    Entry("perceiver", perceiver, perceiver_batch, lacks=UNCHECKPOINTED),
]  # fmt: skip
ENCODER_DECODERS = [
    Entry("t5", lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), seq2seq_batch, prompt),
    Entry("bart", bart, seq2seq_batch, prompt),
    Entry("led", led, seq2seq_batch, prompt),
]
LANGUAGE = [*DECODERS, *ENCODERS, *ENCODER_DECODERS]
