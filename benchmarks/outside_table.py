"""The table of ``make outside``: families of transformers, and models of other packages."""

from __future__ import annotations

from typing import Any

from benchmarks.outside_everyday import everyday_cases, in_layouts
from benchmarks.outside_models import IMAGE, LARGE, MASKED_PAIR, PAIR, SQUARES, TEXT, VIDEO_TASK, Case

Own = dict[str, Any]
PLAIN = "benchmarks.outside_plain"

OPT = """
column **.layers.*.self_attn.{q,k,v}_proj over tp
row **.layers.*.self_attn.out_proj over tp
column **.layers.*.fc1 over tp
row **.layers.*.fc2 over tp
"""
NEOX = """
column **.layers.*.attention.query_key_value over tp
row **.layers.*.attention.dense over tp
column **.layers.*.mlp.dense_h_to_4h over tp
row **.layers.*.mlp.dense_4h_to_h over tp
"""
CAUSAL: dict[str, Own] = {
    "gpt2": {}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]}, "gptj": {}, "gpt_neox": {},
    "gpt_bigcode": {}, "opt": {}, "bloom": {}, "llama": {}, "mistral": {}, "mixtral": {}, "qwen2": {}, "qwen3": {},
    "qwen2_moe": {}, "qwen3_moe": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {}, "phi": {}, "phi3": {}, "olmo": {},
    "olmo2": {}, "olmoe": {}, "falcon": {"head_dim": None}, "stablelm": {}, "starcoder2": {}, "cohere": {},
    "cohere2": {}, "mpt": {}, "codegen": {}, "xglm": {"layerdrop": 0.0}, "biogpt": {"layerdrop": 0.0}, "persimmon": {},
    "nemotron": {}, "granite": {}, "granitemoe": {}, "glm": {}, "glm4": {}, "smollm3": {}, "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4}, "ctrl": {}, "openai-gpt": {},
    "helium": {}, "exaone4": {}, "ernie4_5": {}, "seed_oss": {}, "bitnet": {}, "diffllama": {}, "jetmoe": {},
    "deepseek_v3": {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
                    "num_key_value_heads": 4},
    "gpt_oss": {}, "arcee": {}, "lfm2": {}, "xlnet": {"max_position_embeddings": None, "d_inner": 64}, "rwkv": {},
    "recurrent_gemma": {}, "llama4_text": {}, "modernbert-decoder": {}, "doge": {}, "phimoe": {},
    "mixtral with router logits": {"output_router_logits": True},
    "reformer": {"is_decoder": True, "attention_head_size": 8, "axial_pos_shape": (4, 2), "num_hashes": 1,
                 "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "local"], "feed_forward_size": 64,
                 "local_attn_chunk_length": 4, "max_position_embeddings": 8},
    "gemma3n_text": {"laurel_rank": 4, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
                     "num_hidden_layers": 4, "num_kv_shared_layers": 0, "altup_num_inputs": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [64] * 4,
                     "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "deepseek_v2": {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
                    "num_key_value_heads": 4},
}  # fmt: skip
MASKED: dict[str, Own] = {
    "bert": {}, "roberta": {}, "distilbert": {}, "albert": {}, "electra": {}, "deberta": {}, "deberta-v2": {},
    "mpnet": {}, "camembert": {}, "xlm": {}, "squeezebert": {}, "mobilebert": {}, "fnet": {}, "nystromformer": {},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "d_head": 8, "d_inner": 64}, "convbert": {},
    "big_bird": {"attention_type": "original_full"}, "longformer": {"attention_window": 4}, "modernbert": {},
    "ernie": {}, "esm": {}, "roformer": {}, "rembert": {}, "ibert": {}, "data2vec-text": {}, "megatron-bert": {},
    "xlm-roberta": {}, "luke": {"entity_vocab_size": 16, "entity_emb_size": 8}, "layoutlm": {}, "yoso": {},
}  # fmt: skip
STILL = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "distil": False}
PAIRS: dict[str, Own] = {
    "t5": {}, "mt5": {}, "umt5": {}, "bart": {}, "mbart": {}, "pegasus": {}, "marian": {},
    "m2m_100": STILL, "blenderbot-small": {}, "led": {**STILL, "attention_window": 4},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "plbart": {},
}  # fmt: skip
FOUR = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 32, "patch_size": None,
        "num_hidden_layers": None}  # fmt: skip
SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 2, "hidden_size": None,
        "num_layers": None, "num_hidden_layers": None, "num_attention_heads": None}  # fmt: skip
IMAGES: dict[str, Own] = {
    "vit": {}, "deit": {"architectures": ["DeiTForImageClassification"]}, "beit": {}, "swin": SWIN, "swinv2": SWIN,
    "dinov2": {}, "data2vec-vision": {},
}  # fmt: skip
LARGES: dict[str, Own] = {
    "convnext": FOUR, "convnextv2": FOUR, "resnet": {**FOUR, "embedding_size": 8, "layer_type": "basic"},
    "regnet": {**FOUR, "embedding_size": 8, "groups_width": 8}, "poolformer": FOUR, "bit": {**FOUR, "embedding_size": 8,
    "num_groups": 4}, "segformer": {**FOUR, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    "pvt_v2": {**FOUR, "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2]},
    "mobilevit": {"image_size": 32, "hidden_sizes": [16, 20, 24], "patch_size": 2,
                  "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 32]},
    "cvt": {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3], "patch_size": None},
    "focalnet": {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3],
                 "patch_size": 4, "hidden_sizes": [16, 32]},
    "mobilenet_v2": {"image_size": 32, "depth_multiplier": 0.1},
}  # fmt: skip
SOUND = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
         "num_feat_extract_layers": 2}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWERS = {"text_config": {**TOWER, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 2},
          "vision_config": {**TOWER, "image_size": 16, "patch_size": 8}}  # fmt: skip
VIDEO = {"image_size": 16, "patch_size": 8, "num_frames": 4}
VIDEOS: dict[str, Own] = {
    "videomae": VIDEO,
    "timesformer": VIDEO,
    "vivit": {**VIDEO, "patch_size": None, "tubelet_size": [2, 8, 8]},
}
BASES: dict[str, tuple[str, Own]] = {
    "wav2vec2": ("input_values", SOUND), "hubert": ("input_values", SOUND), "unispeech": ("input_values", SOUND),
    "wavlm": ("input_values", SOUND), "data2vec-audio": ("input_values", {**SOUND, "conv_pos_kernel_size": 3}),
    "audio-spectrogram-transformer": ("mel=input_values", {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8,
                                                           "time_stride": 8}),
    "whisper": ("input_features decoder_input_ids", {"num_mel_bins": 16, "max_source_positions": 16,
                                                     "max_target_positions": 32}),
    "clip": ("input_ids pixel_values", {**TOWERS, "projection_dim": 16}), "siglip": ("input_ids pixel_values", TOWERS),
    "vit_mae": ("pixel_values", {"decoder_hidden_size": 32, "decoder_intermediate_size": 64,
                                 "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}),
    "patchtsmixer": ("past_values", {"num_input_channels": 4, "context_length": 32, "patch_length": 4,
                                     "patch_stride": 4}),
    "informer": ("past=past_values past_features=past_time_features observed=past_observed_mask future=future_values"
                 " future_features=future_time_features",
                 {"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2, 3, 4], "num_time_features": 2,
                  "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "distil": False}),
    "chinese_clip": ("input_ids pixel_values", {**TOWERS, "projection_dim": 16}),
    "patchtst": ("past_values", {"num_input_channels": 4, "context_length": 32, "patch_length": 4, "patch_stride": 4}),
}  # fmt: skip

FAMILIES: dict[str, tuple[str, Own, tuple[str, str]]] = {
    **{name: ("AutoModelForCausalLM", changes, TEXT) for name, changes in CAUSAL.items()},
    **{name: ("AutoModelForMaskedLM", changes, TEXT) for name, changes in MASKED.items()},
    **{name: ("AutoModelForSeq2SeqLM", changes, PAIR) for name, changes in PAIRS.items()},
    **{name: ("AutoModelForSeq2SeqLM", {}, MASKED_PAIR) for name in ("longt5", "switch_transformers")},
    **{name: ("AutoModelForImageClassification", changes, IMAGE) for name, changes in IMAGES.items()},
    **{name: ("AutoModelForImageClassification", changes, LARGE) for name, changes in LARGES.items()},
    **{name: ("AutoModelForVideoClassification", changes, VIDEO_TASK) for name, changes in VIDEOS.items()},
    **{name: ("AutoModel", changes, (inputs, SQUARES)) for name, (inputs, changes) in BASES.items()},
}
"""The head's class, arguments beside the small ones (None: leave that one out), inputs and loss of each family."""
LINES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "seed_oss"), "parc:llama"),
    "bert": "parc:bert", "gpt2": "parc:gpt2", "t5": "parc:t5", "vit": "parc:vit", "phi3": "parc:phi3",
    "olmo2": "parc:olmo2", "gemma3_text": "parc:gemma3", "opt": OPT, "gpt_neox": NEOX,
}  # fmt: skip
"""The lines that split a family over tp: a family of plans that parc ships, or lines of a plan."""

FLAT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
STEPS = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
TIMM: dict[str, Own] = {
    "vit_tiny_patch16_224": FLAT, "deit_tiny_distilled_patch16_224": FLAT, "beit_base_patch16_224": FLAT,
    "eva02_tiny_patch14_224": FLAT, "cait_xxs24_224": FLAT, "xcit_nano_12_p16_224": {**FLAT, "patch_size": 16},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4),
                                     "window_size": 4},
    "convnext_atto": STEPS, "edgenext_xx_small": {**STEPS, "heads": (2, 2, 2, 2)},
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)},
    "resnet50": {"layers": (1, 1, 1, 1), "channels": (4, 8, 8, 8)},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
    **{name: {"img_size": 32} for name in ("mixer_s32_224", "gmixer_12_224", "resmlp_12_224", "gmlp_ti16_224")},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)},
    "davit_tiny": {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2), "window_size": 4},
    "hiera_tiny_224": {"img_size": 32, "embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1, 1)},
    "mobilenetv3_small_050": {}, "ghostnet_050": {}, "regnetx_002": {},
}  # fmt: skip
"""The arguments of each architecture of timm."""

UNET = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16),
        "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}  # fmt: skip
DIFFUSERS: dict[str, tuple[str, Own]] = {
    "UNet2DModel": ("sample timestep", {**UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                                        "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}),
    "UNet2DConditionModel": ("sample timestep encoder_hidden_states",
                             {**UNET, "cross_attention_dim": 32,
                              "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}),
    "DiTTransformer2DModel": ("sample=hidden_states timestep class_labels",
                              {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2,
                               "sample_size": 8, "num_embeds_ada_norm": 6}),
    "FluxTransformer2DModel": (
        "hidden_states encoder_hidden_states pooled_projections timesteps=timestep img_ids txt_ids",
        {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}),
    "SD3Transformer2DModel": (
        "sample=hidden_states encoder_hidden_states pooled_projections timestep",
        {"sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 32,
         "pos_embed_max_size": 8}),
    "UNetSpatioTemporalConditionModel": (
        "latents=sample timesteps=timestep encoder_hidden_states ids3=added_time_ids",
        {"sample_size": 8, "in_channels": 8, "out_channels": 4, "block_out_channels": (32, 64), "layers_per_block": 1,
         "num_attention_heads": (2, 4), "cross_attention_dim": 32, "addition_time_embed_dim": 8, "num_frames": 2,
         "projection_class_embeddings_input_dim": 24,
         "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")}),
    "AutoencoderKL": ("sample", {"in_channels": 4, "out_channels": 4, "block_out_channels": (8,), "norm_num_groups": 4,
                                 "latent_channels": 4, "sample_size": 8}),
}  # fmt: skip
"""The inputs and the arguments of each class of diffusers."""

X_TRANSFORMERS: dict[str, Own] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "rmsnorm and swiglu": {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True}, "scalenorm": {"use_scalenorm": True},
    "norms of q and k": {"attn_qk_norm": True}, "few keys": {"attn_kv_heads": 2},
    "relative bias": {"rel_pos_bias": True},
    "flash": {"attn_flash": True}, "macaron": {"macaron": True}, "residual attention": {"residual_attn": True},
    "gated values": {"attn_gate_values": True},
}  # fmt: skip
"""The arguments of each variant of an x-transformers decoder."""


def cases() -> dict[str, Case]:
    """Return every model under its plans, by name."""
    table = {
        "plain nanoGPT": Case("nano_gpt", "", "idx targets", "output.1", place=PLAIN),
        "plain Meta's Llama": Case("meta_llama", "", "tokens targets", "cross_entropy(output, targets)", place=PLAIN),
    }
    for name, (_, _, task) in FAMILIES.items():
        table[f"transformers {name}"] = Case("transformer", f'name="{name}"', *task)
        if lines := LINES.get(name):
            lines = f'include "{lines}" (tp=2)' if lines.startswith("parc:") else lines
            table[f"transformers {name} tp=2"] = Case("transformer", f'name="{name}"', *task, lines, "dp=2, tp=2")
    for name in TIMM:
        table[f"timm {name}"] = Case("timm_model", f'name="{name}"', "x labels", "cross_entropy(output, labels)")
    for name, (inputs, _) in DIFFUSERS.items():
        table[f"diffusers {name}"] = Case("diffusers_model", f'name="{name}"', inputs, SQUARES)
    for name in X_TRANSFORMERS:
        task = ("ids=x targets", "cross_entropy(output, targets)")
        table[f"x-transformers {name}"] = Case("x_transformer", f'name="{name}"', *task)
    table |= everyday_cases()
    return table | dict(in_layouts(table))
