"""Keys of config.json that have no effect on the numbers, or none at their present value. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinyllm.config.family import FULL

# Keys without effect on the numbers of inference, whatever their value.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path _sliding_window
    architectures attention_dropout attn_implementation attn_pdrop auto_map bos_token_id classifier_dropout
    embd_pdrop embedding_dropout finetuning_task gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range is_llama_config keys_to_ignore_at_inference label2id language license max_sequence_length
    mlx_version model_max_length model_name model_type name_or_path neftune_noise_alpha num_labels
    output_attentions output_hidden_states output_router_logits pad_token_id prefix problem_type resid_pdrop
    return_dict return_dict_in_generate sep_token_id summary_type task_specific_params
    tf_legacy_loss tokenizer_class tokenizer_model_max_length tokenizer_padding_side torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    vocab_file
    """.split()
)

# Generation settings that older files keep here; generation_config.json is where they are read from.
GENERATION = frozenset(
    """
    bad_words_ids begin_suppress_tokens cache_implementation decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    renormalize_logits repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """.split()
)


def _falsy(value: Any) -> bool:
    return not value


# Keys that would change the computation, at the values with which they do not.
HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "add_cross_attention": _falsy,
    "chunk_size_feed_forward": lambda value: True,
    "cross_attention_hidden_size": _falsy,
    "is_decoder": lambda value: True,
    "is_encoder_decoder": _falsy,
    "layer_types": lambda value: isinstance(value, list) and set(map(str, value)) <= {FULL},
    "max_window_layers": lambda value: True,
    "pruned_heads": _falsy,
    "rope_interleaved": _falsy,
    "sliding_window": _falsy,
    "tie_encoder_decoder": _falsy,
    "use_mrope": _falsy,
    "use_sliding_window": _falsy,
}
