"""Environments and tools: they answer the policy between its turns. Importing this package needs no vLLM."""

from torchtitan_rl.data.tool_schemas import tool_schemas
from torchtitan_rl.data.turns import Environment, Message, Turn, environment_reward
from torchtitan_rl.environments.checks import Context
from torchtitan_rl.environments.tools import ToolEnvironment, in_process
