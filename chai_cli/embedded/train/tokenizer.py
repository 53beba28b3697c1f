"""The text side of the model: a byte-level tokenizer that never meets an unknown character, and a small UMT5 encoder."""

from __future__ import annotations

from itertools import islice

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from chai_cli.embedded.captions import caption
from chai_cli.embedded.world import scenes

PAD, EOS = "<pad>", "</s>"
VOCABULARY = 600
TEXT_DIM = 128


def build_tokenizer(sentences: int = 20_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE over captions of the world, lower case, one end token."""
    rng = np.random.default_rng(0)
    texts = [caption(scene, rng)[0] for scene in islice(scenes(0), sentences)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, model_max_length=512)


def build_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary,
            d_model=TEXT_DIM,
            d_kv=32,
            num_heads=4,
            d_ff=256,
            num_layers=3,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=64,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    )
