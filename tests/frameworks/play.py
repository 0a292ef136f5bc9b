"""Play scripted conversations with the frameworks of docs/agents.md, each in a venv of its own, against the real gateway.

    .venv/bin/python tests/frameworks/play.py VENVS [NAME...]

VENVS has a folder for each framework, as in `FRAMEWORKS`. Prints a line for each scenario: how it ended, turns, traces, tool errors,
and whether every sampled token is trained once.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.parts.conversations import ScriptedEngine, conversations, prompts
from tests.parts.talk import chat_tokenizer
from torchtitan_rl.conversation import Conversation
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.generator.rollout import roll_out
from torchtitan_rl.sampling import SamplingConfig

HERE = Path(__file__).parent / "agents"


class Framework(NamedTuple):
    """A framework, and how its agent is started."""

    venv: str
    package: str
    script: str
    calls: str = "tool"
    """What it reads as a call: a tool call, code, a shell command, or dspy's fields."""
    env: dict[str, str] = {}


OPENAI_AGENTS = "agents", "openai-agents", "openai_agents_agent.py"
PYDANTIC_AI = "pydantic", "pydantic-ai-slim", "pydantic_ai_agent.py"
JS_AGENTS = "agents_node", "@openai/agents", "js_agents.mjs"
FRAMEWORKS = {
    "openai": Framework("openai", "openai", "openai_chat.py"),
    "openai-agents": Framework(*OPENAI_AGENTS, env={"API": "responses"}),
    "openai-agents, chat": Framework(*OPENAI_AGENTS, env={"API": "chat_completions"}),
    "pydantic-ai": Framework(*PYDANTIC_AI, env={"API": "chat"}),
    "pydantic-ai, responses": Framework(*PYDANTIC_AI, env={"API": "responses"}),
    "langgraph": Framework("langchain", "langchain", "langgraph_agent.py"),
    "smolagents ToolCalling": Framework("smol", "smolagents", "smolagents_toolcalling.py"),
    "smolagents Code": Framework("smol", "smolagents", "smolagents_code.py", "code"),
    "autogen": Framework("autogen", "autogen-agentchat", "autogen_agent.py"),
    "agno": Framework("agno", "agno", "agno_agent.py"),
    "crewai": Framework("crewai", "crewai", "crewai_agent.py"),
    "litellm": Framework("litellm", "litellm", "litellm_loop.py"),
    "mini-swe-agent": Framework("mini", "mini-swe-agent", "mini_swe_agent.py", "bash"),
    "inspect-ai": Framework("inspect", "inspect-ai", "inspect_agent.py"),
    "dspy ReAct": Framework("dspy", "dspy", "dspy_react.py", "dspy"),
    "anthropic": Framework("anthropic", "anthropic", "anthropic_messages.py"),
    "AI SDK": Framework("aisdk", "ai", "ai_sdk.mjs"),
    "AI SDK, responses": Framework("aisdk", "ai", "ai_sdk.mjs", env={"AI_SDK_API": "responses"}),
    "strands": Framework("strands", "strands-agents", "strands_agent.py"),
    "openai, Node": Framework("openai_node", "openai", "node_openai.mjs"),
    "anthropic, Node": Framework("anthropic_node", "@anthropic-ai/sdk", "claude_js.mjs"),
    "@openai/agents": Framework(*JS_AGENTS),
    "@openai/agents, chat": Framework(*JS_AGENTS, env={"API": "chat_completions"}),
    "chatlas": Framework("chatlas", "chatlas", "chatlas_agent.py"),
    "chatlas, responses": Framework("chatlas", "chatlas", "chatlas_agent.py", env={"API": "responses"}),
    "atomic-agents": Framework("atomic", "atomic-agents", "atomic_agent.py"),
    "google-adk": Framework("adk", "google-adk", "adk_agent.py"),
    "agent-framework": Framework("msaf", "agent-framework-core", "ms_agent.py"),
    "agent-framework, chat": Framework("msaf", "agent-framework-core", "ms_agent.py", env={"API": "chat"}),
    "@mastra/core": Framework("mastra", "@mastra/core", "mastra_agent.mjs"),
    "@voltagent/core": Framework("volt", "@voltagent/core", "volt_agent.mjs"),
    "AI SDK 7": Framework("ai7", "ai", "ai_sdk.mjs"),
    "AI SDK 7, responses": Framework("ai7", "ai", "ai_sdk.mjs", env={"AI_SDK_API": "responses"}),
}


def call(arguments: str, name: str = "multiply") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


QUESTION = "What is 3 * 4? Use the tool."
RIGHT, DONE = call('{"a": 3, "b": 4}'), "It is 12."
SCENARIOS = {
    "one tool": [RIGHT, DONE],
    "two calls": [RIGHT + call('{"a": 5, "b": 6}'), DONE],
    "wrong name": [call("{}", name="divide"), DONE],
    "bad arguments": [call('{"a": "three"}'), DONE],
    "broken call": ["<tool_call>{broken</tool_call>", DONE],
    "empty": ["", DONE],
    "stream": [RIGHT, DONE],
    "trimmed history": [RIGHT, RIGHT, RIGHT, DONE],
}
OTHER_FORMS = {
    "code": {
        RIGHT: "Thought: I multiply.\n<code>\nprint(multiply(a=3, b=4))\n</code>",
        DONE: 'Thought: done.\n<code>\nfinal_answer("It is 12.")\n</code>',
    },
    "bash": {
        RIGHT: '<tool_call>{"name": "bash", "arguments": {"command": "echo $((3*4))"}}</tool_call>',
        DONE: '<tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 12"}}'
        "</tool_call>",
    },
    "dspy": {
        RIGHT: "[[ ## next_thought ## ]]\nI multiply.\n\n[[ ## next_tool_name ## ]]\nmultiply\n\n[[ ## next_tool_args ## ]]\n"
        '{"a": 3, "b": 4}\n\n[[ ## completed ## ]]',
        DONE: "[[ ## next_thought ## ]]\nDone.\n\n[[ ## next_tool_name ## ]]\nfinish\n\n[[ ## next_tool_args ## ]]\n{}\n\n"
        "[[ ## reasoning ## ]]\nr\n\n[[ ## answer ## ]]\nIt is 12.\n\n[[ ## completed ## ]]",
    },
    "final_answer": {DONE: call('{"answer": "It is 12."}', name="final_answer")},
}


def agent_of(venvs: Path, name: str, question: str, **env: str) -> AgentEnvironment:
    """The framework's agent, started as a command."""
    framework = FRAMEWORKS[name]
    script = HERE / framework.script
    venv = venvs / framework.venv
    command = [f"{venv}/bin/python", str(script)]
    if script.suffix == ".mjs":
        linked = venv / script.name  # node looks for packages beside the script
        linked.write_text(script.read_text())
        command = ["node", str(linked)]
    env = {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore", **framework.env, **env}
    return AgentEnvironment(command, task=question, env=env, role="tool")


def play(venvs: Path, name: str, scenario: str, made) -> tuple[Conversation, ScriptedEngine]:
    """The rollout of one framework's agent."""
    texts = [OTHER_FORMS.get(FRAMEWORKS[name].calls, {}).get(text, text) for text in SCENARIOS[scenario]]
    if name == "smolagents ToolCalling":
        texts = [OTHER_FORMS["final_answer"].get(text, text) for text in texts]
    [prompt] = prompts(made, 1)
    one = Conversation(
        prompt=prompt, sample_idx=0, sampling=SamplingConfig(max_tokens=4000), most_in_turn=1000, most_tokens=60_000
    )
    limits = {"on_failure": "none", "max_turns": 24, "call_seconds": 240, "max_answer_characters": 100_000}
    environments = conversations(lambda _: agent_of(venvs, name, QUESTION, SCENARIO=scenario), made, **limits)
    # The script follows what it is asked: no grammar is needed.
    pool = environments.start([one], make_grammar=lambda *_, **__: None)
    policy = ScriptedEngine(made, *texts)
    try:
        list(roll_out([one], policy, pool, lambda value: value, wait_for_answers=False))
    finally:
        pool.close()
    return one, policy


def trained_once(one: Conversation, policy: ScriptedEngine) -> bool:
    """Whether the loss has exactly the tokens that the policy said, and each trace those of its own turns."""
    completion = one.completion(0)
    trained = []
    for span in completion.spans:
        trained += completion.token_ids[span][completion.loss_mask[span]].tolist()
    in_traces = sorted(range(len(policy.said)), key=lambda i: one.turns[i].trace)
    return trained == [token for i in in_traces for token in policy.said[i]]


def version(venv: Path, package: str) -> str:
    if (venv / "node_modules").exists():
        code = f"console.log(require('./node_modules/{package}/package.json').version)"
        return subprocess.run(["node", "-e", code], cwd=venv, capture_output=True, text=True).stdout.strip()
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([f"{venv}/bin/python", "-c", code], capture_output=True, text=True).stdout.strip()


def main(venvs: Path, names: list[str]) -> None:
    made = chat_tokenizer()
    only = os.environ.get("SCENARIOS", "")
    for name in names or FRAMEWORKS:
        framework = FRAMEWORKS[name]
        print(f"{name} ({framework.package} {version(venvs / framework.venv, framework.package)})", flush=True)
        for scenario in only.split(",") if only else SCENARIOS:
            one, policy = play(venvs, name, scenario, made)
            rewards = [turn.reward for turn in one.turns if turn.reward is not None]
            errors = sum(turn.columns.get("tool_errors", 0) for turn in one.turns)
            exact = "exact" if trained_once(one, policy) else "NOT EXACT"
            print(
                f"  {scenario:16} {one.finish_reason:11} turns {len(one.turns):2}  traces {len(one.traces):2}  "
                f"tool errors {errors}  reward {rewards}  {exact}",
                flush=True,
            )
            if os.environ.get("VERBOSE"):
                for trace in one.traces[1:]:
                    print(f"      trace: {trace.origin.reason[:600]}")
            if one.error:
                print("    " + one.error[-800:].replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
