"""Models of images, speech and series: those of `transformers`, tiny and random, and our CNNs."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.models import cnn
from tests.models.entry import (
    UNCHECKPOINTED,
    VOCAB,
    WIDTH,
    Batch,
    Entry,
    image_batch,
    images,
    integers,
    noise,
    padded,
    tokens,
)
from tests.models.language import DECODER, DROPOUT, ENCODER, GROUPED, SHAPE, Options

PATCHES: Options = {**SHAPE, "image_size": 32, "patch_size": 8}
IMAGE_TOKEN = VOCAB - 1


def clip() -> Any:
    return hf.CLIPModel(hf.CLIPConfig(
        text_config={**ENCODER, "projection_dim": 16, "attention_dropout": 0.1},
        vision_config={**PATCHES, "projection_dim": 16}, projection_dim=16,
    ))  # fmt: skip


def llava() -> Any:
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**PATCHES), text_config=hf.LlamaConfig(**GROUPED),
        image_token_index=IMAGE_TOKEN,
    ))  # fmt: skip


def whisper() -> Any:
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(
        vocab_size=VOCAB, d_model=WIDTH, num_mel_bins=8, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=20, max_target_positions=32, dropout=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    ))  # fmt: skip


def wav2vec2() -> Any:
    # SpecAugment masks by numpy's generator; the positional convolution has weight norm
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(
        **DECODER, conv_dim=[16, 16], conv_kernel=[10, 3], conv_stride=[5, 2],
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_length=2, mask_time_prob=0.3,
    ))  # fmt: skip


def vit_mae() -> Any:
    return hf.ViTMAEForPreTraining(hf.ViTMAEConfig(
        **PATCHES, **DROPOUT, decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=32,
    ))  # fmt: skip


def swin() -> Any:
    return hf.SwinForImageClassification(hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4,
        drop_path_rate=0.2, hidden_dropout_prob=0.1,
    ))  # fmt: skip


def convnext() -> Any:
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(
        image_size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, drop_path_rate=0.2,
    ))  # fmt: skip


def segformer() -> Any:
    shape: Options = {"num_labels": 3, "decoder_hidden_size": 16}
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig(
        **shape,
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        num_attention_heads=[1, 2], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2],
    ))  # fmt: skip


def patch_tst() -> Any:
    return hf.PatchTSTForPrediction(hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4,
        prediction_length=4, d_model=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=32,
    ))  # fmt: skip


def clip_batch() -> Batch:
    return padded("right") | {"pixel_values": images(), "return_loss": True}


def llava_batch() -> Batch:
    text = tokens(2, 5, end=IMAGE_TOKEN)
    holes = torch.full((2, 16), IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([holes, text], 1),
        "pixel_values": images(),
        "labels": torch.cat([holes.fill_(-100), text], 1),
    }


def speech() -> Batch:
    return {"input_features": noise(2, 8, 40)}


def speech_batch() -> Batch:
    return speech() | {"labels": tokens(2, 6)}


def wave_batch() -> Batch:
    return {"input_values": noise(2, 400), "labels": tokens(2, 4)}


def pixels_batch() -> Batch:
    return {"pixel_values": images(), "labels": integers(3, 2, 32, 32)}


def series_batch() -> Batch:
    return {"past_values": noise(2, 16, 2), "future_values": noise(2, 4, 2, seed=4)}


def class_batch() -> Batch:
    return {"x": images(16), "y": torch.tensor([1, 3])}


def mask_batch() -> Batch:
    return {"x": images(16), "y": images(16)[:, :1].sigmoid()}


PERCEPTION = [
    Entry("resnet", cnn.ResNet, class_batch),
    Entry("unet", cnn.UNet, mask_batch),
    Entry("vit", lambda: hf.ViTForImageClassification(hf.ViTConfig(**PATCHES, **DROPOUT)),
          image_batch),
    Entry("clip", clip, clip_batch),
    Entry("llava", llava, llava_batch),
    Entry("whisper", whisper, speech_batch, speech),
    Entry("wav2vec2", wav2vec2, wave_batch),
    Entry("swin", swin, image_batch),
    Entry("convnext", convnext, image_batch, lacks=UNCHECKPOINTED),
    Entry("segformer", segformer, pixels_batch),
    Entry("vit_mae", vit_mae, lambda: {"pixel_values": images()}),
    Entry("patch_tst", patch_tst, series_batch, lacks=UNCHECKPOINTED),
]  # fmt: skip
