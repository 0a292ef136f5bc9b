"""The settings of sampling."""

from dataclasses import dataclass, field

from torchtitan_rl.fields.number import number


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    n: int = number(8, least=0, most=65536)
    """Completions per prompt; they share its prefix cache. 0, in an evaluation: it samples nothing."""

    max_tokens: int = number(512, least=1)
    """Maximum length of a completion, in tokens. A longer one is cut and has finish_reason "length"."""

    temperature: float = number(1.0, least=0, most=2)
    """Softmax temperature; 0 is greedy, and otherwise at least 0.01, which is vLLM's least. The trainer computes its
    log-probabilities at the same temperature."""

    top_p: float = number(1.0, above=0, most=1)
    """Nucleus sampling: from the most likely tokens that together have this probability. In training the engine records
    which tokens it kept, and the trainer normalises over them, as with top_k and min_p."""

    top_k: int = number(0, least=0)
    """Sample from the k most likely tokens; 0 keeps all tokens."""

    min_p: float = number(0.0, least=0, most=1)
    """Sample from the tokens at least this fraction as likely as the most likely one; 0 keeps all tokens."""

    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, or a turn of a conversation. The text's tokens belong to the completion."""

    stop_token_ids: list[int] = number([], least=0, remedy="Use the tokenizer's ids.")
    """Tokens that end a completion, besides the end tokens of the model's folder and of the chat template."""

    @property
    def truncates(self) -> bool:
        """Whether it keeps a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
