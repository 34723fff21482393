"""Multimodal models whose text model is run. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wrapper:
    """A multimodal `model_type` whose text model stands under `text_config`, run here without its other towers."""

    model_type: str
    text_prefixes: tuple[str, ...]  # of tensor names, longest first: "model." follows in their place
    skipped: tuple[str, ...]  # prefixes of tensors that belong to the other towers
    tie_word_embeddings: bool  # where neither config says
    inert: frozenset[str] = frozenset()


_OLD_AND_NEW = ("model.language_model.", "language_model.model.")  # as transformers 5 has it in memory, and the hub
_VISION = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")

WRAPPERS: Mapping[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        Wrapper(
            "mistral3",
            text_prefixes=_OLD_AND_NEW,
            skipped=_VISION,
            tie_word_embeddings=True,
            inert=frozenset(
                {
                    "vision_config",
                    "image_token_index",
                    "image_token_id",
                    "vision_feature_layer",
                    "projector_hidden_act",
                    "multimodal_projector_bias",
                    "spatial_merge_size",
                }
            ),
        ),
        Wrapper(
            "llama4",
            text_prefixes=_OLD_AND_NEW,
            skipped=(
                "vision_model.",
                "multi_modal_projector.",
            ),
            tie_word_embeddings=False,
            inert=frozenset({"vision_config", "image_token_index", "boi_token_index", "eoi_token_index"}),
        ),
        Wrapper(
            "gemma3",
            text_prefixes=_OLD_AND_NEW,
            skipped=_VISION,
            tie_word_embeddings=True,
            inert=frozenset(
                {
                    "vision_config",
                    "image_token_index",
                    "image_token_id",
                    "boi_token_index",
                    "boi_token_id",
                    "eoi_token_index",
                    "eoi_token_id",
                    "mm_tokens_per_image",
                }
            ),
        ),
        Wrapper(
            "gemma4",
            text_prefixes=_OLD_AND_NEW,
            skipped=tuple(
                f"{prefix}{tower}."
                for prefix in ("model.", "")
                for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
            ),
            tie_word_embeddings=True,
            inert=frozenset(
                {
                    "vision_config",
                    "audio_config",
                    "image_token_id",
                    "video_token_id",
                    "audio_token_id",
                    "boi_token_id",
                    "eoi_token_id",
                    "boa_token_id",
                    "eoa_token_id",
                    "eoa_token_index",
                    "vision_soft_tokens_per_image",
                }
            ),
        ),
        *(
            Wrapper(
                model_type,
                text_prefixes=("model.language_model.", "language_model.model."),
                skipped=("model.visual.", "visual.", "vision_tower."),
                tie_word_embeddings=False,
                inert=frozenset(
                    {
                        "vision_config",
                        "image_token_id",
                        "video_token_id",
                        "vision_start_token_id",
                        "vision_end_token_id",
                    }
                ),
            )
            for model_type in ("qwen3_5", "qwen3_5_moe")
        ),
    )
}
