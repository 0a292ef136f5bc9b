"""The library: parts a run is put together from. Each one can be added or removed without touching the others.

tasks: prompts, expected answers and their judgement       rewards: reward functions for any task
environments: multi-turn conversations and tools           prompts: from examples to prompt tokens
maxent, seed_grpo: algorithms beyond core.algorithm        models: model families, from a Hugging Face config.json
starts: demonstration policies that a run trains itself, on a CPU in minutes
agents: programs that speak to the policy over HTTP, each the environment of a conversation

answers and math_answers compare answers; references loads functions by name. Import from these modules, for example
`from torchtitan_rl.library.tasks import Rows`. Importing `torchtitan_rl.library` itself loads none of them.
"""
