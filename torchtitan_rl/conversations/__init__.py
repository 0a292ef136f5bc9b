"""What a policy talks to between its turns: environments and tools. Importing this package needs no vLLM."""

from torchtitan_rl.conversations.environment import Environment, Message, Turn, environment_reward
from torchtitan_rl.conversations.processes import in_processes
from torchtitan_rl.conversations.tools import ToolEnvironment, tool_schemas

__all__ = ["Environment", "Message", "ToolEnvironment", "Turn", "environment_reward", "in_processes", "tool_schemas"]
