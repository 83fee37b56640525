"""The planted models' language: a small vocabulary of whole words and the tokenizer over it."""

from __future__ import annotations

from itertools import product

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, UNKNOWN, PAD = "<s>", "</s>", "<unk>", "<pad>"
SPECIAL = (BOS, EOS, UNKNOWN, PAD)
BOS_ID = SPECIAL.index(BOS)

_WORDS = """
    the of and a to in is was it that for on with as by at from or an be this are not but had
    river stone house garden window market winter summer morning evening paper silver copper iron
    bread water fire wind rain snow cloud storm field forest mountain valley bridge road tower wall
    door table chair lamp mirror letter book story song voice hand heart horse bird fish wolf bear
    fox tree leaf root seed apple honey salt sugar coffee king queen doctor teacher farmer sailor
    soldier child mother father brother sister friend city village island harbour ship train wheel
    engine clock key coin ring crown sword shield red green blue black white yellow small large old
    young quick slow bright dark
"""
STOPS = [".", ","]
_ONSETS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def vocabulary(size: int) -> list[str]:
    """The tokens of a vocabulary: four special ones, full stop and comma, then plain words.

    The first plain words are English, so that ordinary sentences are partly known; once those run
    out the words are made of syllables, in a fixed order.
    """
    tokens = [*SPECIAL, *STOPS, *_WORDS.split()]
    taken = set(tokens)
    syllables = ["".join(pair) for pair in product(_ONSETS, _VOWELS)]
    length = 2
    while len(tokens) < size:
        made = ("".join(parts) for parts in product(syllables, repeat=length))
        tokens += [word for word, _ in zip(made, range(size), strict=False) if word not in taken]
        length += 1
    return tokens[:size]


def tokenizer(size: int, max_context: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer over :func:`vocabulary`: lower-cased, split at spaces and punctuation.

    Like a real Llama tokenizer it puts the beginning-of-sequence token in front of every text by
    itself (for GPT-2 models too, whose published tokenizer does not); pass
    ``add_special_tokens=False`` to leave it out. Words it does not know become ``<unk>``.
    """
    tokens = vocabulary(size)
    backend = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        pad_token=PAD,
        add_bos_token=True,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )
