"""Arguments of ``timm.create_model`` with which people build ViTs, beside those that make one small."""

from functools import partial

from timm.layers import RmsNorm, SwiGLU, SwiGLUPacked
from torch import nn

SMALL = {"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 10, "img_size": 32}

# Ten of which all pairs are tried.
TEN = [
    {"class_token": False, "global_pool": "avg"},
    {"reg_tokens": 2},
    {"init_values": 1e-4},
    {"qk_norm": True},
    {"act_layer": nn.ReLU},
    {"norm_layer": partial(nn.LayerNorm, eps=1e-3)},
    {"pos_embed": "none"},
    {"global_pool": "map"},
    {"patch_size": 8},
    {"mlp_layer": SwiGLUPacked},
]

VIT = [
    *TEN,
    {"act_layer": "gelu_tanh"},
    {"act_layer": partial(nn.GELU, approximate="tanh")},
    {"norm_layer": "rmsnorm"},
    {"norm_layer": RmsNorm, "scale_mlp_norm": True},
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "prr"},
    {"global_pool": "", "final_norm": False},
    {"img_size": (48, 32), "in_chans": 1},
    {"mlp_layer": SwiGLU, "mlp_ratio": 2.7},
    {"qkv_bias": False, "proj_bias": False},
    {"scale_attn_norm": True, "scale_mlp_norm": True},
    {"no_embed_class": True, "pre_norm": True},
    {"fc_norm": True, "pool_include_prefix": True},
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {"drop_rate": 0.1, "pos_drop_rate": 0.1, "patch_drop_rate": 0.1, "drop_path_rate": 0.1},
    {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1},
    {"embed_norm_layer": nn.LayerNorm, "weight_init": "jax", "fix_init": True},
    {"attn_layer": "attn", "num_classes": 0},
    {"use_naflex": True},
]

EVA = [
    {"class_token": False, "num_reg_tokens": 2, "no_embed_class": True},
    {"use_abs_pos_emb": False},
    {"use_rot_pos_emb": False},
    {"rope_type": "mixed"},
    {"rope_type": "dinov3", "rope_temperature": 100.0},
    {"rope_grid_offset": 0.5, "rope_grid_indexing": "xy", "rope_rotate_half": True, "ref_feat_shape": 8},
    {"qkv_bias": False, "qkv_fused": False},
    {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1},
    {"attn_type": "rope", "qk_norm": True, "scale_attn_inner": True},
    {"swiglu_mlp": False},
    {"swiglu_mlp": False, "scale_mlp": True},
    {"scale_mlp": True, "mlp_ratio": 3.3},
    {"swiglu_align_to": 8},
    {"init_values": 0.1, "attn_only_layer_scale": True},
    {"global_pool": "map", "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 2.0},
    {"global_pool": "token", "use_pre_transformer_norm": True, "use_post_transformer_norm": True},
    {"use_fc_norm": False, "norm_layer": partial(nn.LayerNorm, eps=1e-3)},
    {"dynamic_img_size": True, "drop_path_rate": 0.1, "patch_drop_rate": 0.2},
]

BEIT = [
    {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    {"use_shared_rel_pos_bias": True, "use_abs_pos_emb": True},
    {"swiglu_mlp": True, "scale_mlp": True, "qkv_bias": False},
    {"scale_mlp": True, "init_values": 0.0, "global_pool": "token"},
]

SAM = [
    {"window_size": 0},
    {"window_size": 3, "img_size": 64, "global_attn_indexes": (1,)},
    {"use_rel_pos": False, "use_rope": True, "window_size": 4, "img_size": 64, "ref_feat_shape": (8, 4)},
    {"use_abs_pos": False, "neck_chans": 0, "head_hidden_size": 24},
    {"neck_chans": 0, "pre_norm": True, "qk_norm": True},
    {"neck_chans": 16, "init_values": 0.1, "act_layer": nn.ReLU, "global_pool": "max"},
]

NAFLEX = [
    {"global_pool": "map", "class_token": True},
    {"reg_tokens": 2, "pool_include_prefix": True},
    {"pos_embed": "factorized", "pos_embed_ar_preserving": True},
    {"pos_embed_grid_size": (3, 5)},
    {"rope_type": "axial", "pos_embed": "none"},
    {"rope_type": "mixed"},
    {"attn_type": "eva", "attn_gated": True},
    {"swiglu_mlp": True, "scale_mlp_norm": True, "global_pool": "map"},
    {"scale_mlp_norm": True, "scale_attn_inner_norm": True},
    {"fc_norm": False, "act_layer": "relu"},
    {"final_norm": False, "norm_layer": "rmsnorm"},
    {"embed_proj_type": "conv", "embed_norm_layer": "layernorm"},
    {"use_key_only_attn_mask": True, "enable_patch_interpolator": True},
]

FEATURES = {"features_only": True, "out_indices": (0, 1)}
NAFLEX_SMALL = {name: value for name, value in SMALL.items() if name != "img_size"} | {"pos_embed_grid_size": (2, 2)}

# Architecture -> what makes it small, and the arguments to try.
ARGUMENTS = {
    "vit_tiny_patch16_224": (SMALL, [*VIT, FEATURES]),
    "eva02_tiny_patch14_224": ({**SMALL, "img_size": 28}, [*EVA, FEATURES]),
    "beit_base_patch16_224": (SMALL, [*BEIT, FEATURES]),
    "samvit_base_patch16_224": (SMALL, [*SAM, FEATURES]),
    "naflexvit_base_patch16_gap": (NAFLEX_SMALL, [*NAFLEX, FEATURES, {"features_only": True, "depth": 3}]),
}
CASES = [(name, {**small, **args}) for name, (small, all_args) in ARGUMENTS.items() for args in all_args]


def label(value):
    """What pytest calls a case."""
    return value if isinstance(value, str) else "-".join(name for name in value if name not in SMALL)
