"""Demonstration: a byte-level tokenizer with a few hundred tokens, for policies small enough to train on a laptop."""

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
_SPECIAL = re.compile(r"<\|\w+\|>")

ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }})\n{% endfor %}<|endoftext|>{% endif -%}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
"""A short template for small context lengths: one token before and one after each message.

Tools are listed by name and argument names only.
"""


def make_small_tokenizer(
    texts: Iterable[str], *, vocab_size: int, lone_characters: str = "[0-9]", chat: bool = False
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer trained on `texts`, with exactly `vocab_size` tokens.

    Every byte is a token, so any text round-trips. The same texts give the same tokenizer. If the texts do not fill the
    vocabulary, reserved tokens do, so that every row of the embedding has a token.

    Args:
        lone_characters: a regular expression; each matching character is a token of its own. With digits, numbers of
        any
            length are tokenized in the same way.
        chat: add `CHAT_TEMPLATE` and a token for each role. The texts may contain these tokens.

    Raises:
        ValueError: if `vocab_size` is less than 256 plus the number of special tokens.
    """
    special = [EOS_TOKEN, PAD_TOKEN, *(f"<|{role}|>" for role in (ROLES if chat else ()))]
    if vocab_size < 256 + len(special):
        least = 256 + len(special)
        raise ValueError(
            f"vocab_size={vocab_size}: expected at least {least}, for 256 bytes and {len(special)} special tokens."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(lone_characters), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_SPECIAL.sub("\n", text) for text in texts), trainer)
    num_reserved = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{index}|>" for index in range(num_reserved)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE if chat else None,
    )
