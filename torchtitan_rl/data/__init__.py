"""Prompt streams: from a task's examples to tokenised prompts."""

from torchtitan_rl.data.prompt_stream import PromptStream

__all__ = ["PromptStream"]
