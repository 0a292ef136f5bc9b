"""Agents in their own processes: an OpenAI-compatible address of the policy. Importing this package needs no vLLM."""

from torchtitan_rl.environments.agents.environment import AgentEnvironment
