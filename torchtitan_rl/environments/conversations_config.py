"""The settings of conversations."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config import Configurable

from torchtitan_rl.fields.number import number


@dataclass(kw_only=True, slots=True)
class ConversationsConfig(Configurable.Config):
    """Limits of a conversation."""

    max_turns: int = number(8, least=1)
    """Maximum number of policy turns. A conversation that needs more ends with finish_reason "max_turns"."""

    max_traces: int = number(16, least=1, remedy="Use 1 if no history may be rewritten.")
    """Maximum number of token sequences of one rollout. An agent opens one whenever it rewrites its history, for
    example to compact it, and for each of its sub-agents. A rollout that needs more ends with finish_reason
    "max_traces"."""

    max_rollout_tokens: int | None = number(None, least=1, remedy="Leave it out for no limit.")
    """Maximum tokens of all traces of a rollout together, contexts included. All of them share a micro-batch, so
    this bounds its memory. A rollout that needs more ends with finish_reason "max_tokens". None: no limit."""

    max_turn_tokens: int | None = number(None, least=1, remedy="Leave it out for no limit.")
    """Maximum tokens in one turn. A longer turn ends the conversation with finish_reason "max_tokens". Two other
    limits do the same: sampling.max_tokens for all turns of the policy together, and generator.max_model_len for
    the whole conversation. None: no limit for a single turn."""

    time_limit_seconds: float = number(0.0, least=0, remedy="Use 0 for no limit.")
    """Time limit of a whole conversation, in seconds. It is checked when an environment is called; the
    finish_reason is then "time". 0: no limit."""

    call_seconds: float = number(60.0, least=0, remedy="Use 60; 0 sets no limit.")
    """Time limit of one call of an environment, in seconds. A call that takes longer counts as failed. 0: no
    limit."""

    max_answer_characters: int = number(20_000, least=1)
    """Maximum length of one message from an environment. A longer message counts as a failure."""

    max_open: int = number(512, least=1)
    """Maximum number of environments that one engine has open at once. The next conversation begins when another
    environment has been closed."""

    workers: int = number(64, least=1, most=1024)
    """Maximum number of processes of one engine in which tools run. A call over its time limit is killed. A process is
    started when all others are busy. Coroutine functions and tools with @in_process need none."""

    on_failure: Literal["raise", "none"] = "raise"
    """Handling of an environment that raises, times out or returns an invalid value. raise: stop the run. none: end
    the conversation with finish_reason "env_error" and without a reward. Such a conversation is left out of the
    baseline and counted in the metrics."""

    tool_call_parser: str = "auto"
    """Reads the policy's tool calls. auto: the JSON formats of Qwen, Hermes and Llama 3. Any other: the name of one of
    vLLM's tool parsers, as for `vllm serve --tool-call-parser`."""

    wait_for_answers: bool = False
    """Pause sampling while an environment is running. The composition of a batch then does not depend on timing, so
    a run is bit-for-bit repeatable. Use it with environments that answer at once. Without it the tokens are the
    same unless the last bit of a log-probability decides between two tokens."""
