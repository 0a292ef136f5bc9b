"""Play two samples of one prompt with each coding agent of docs/agents.md, as a group, against the real gateway.

    .venv/bin/python -m tests.frameworks.coding_agents VENVS [NAME...]

VENVS has a folder for each agent, with the packages of `AGENTS`, and `node22` with npm's node@22. Prints how each sample ended, its
turns and traces, whether both read the same prompt, and whether every sampled token is in the packed group once.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from tests.frameworks.play import HERE
from tests.parts.conversations import ScriptedEngine, conversations, prompts
from tests.parts.talk import chat_tokenizer
from torchtitan_rl.algorithm.episodes import draft_episodes
from torchtitan_rl.conversation import Conversation, Sampled
from torchtitan_rl.environments.agents import AgentEnvironment
from torchtitan_rl.generator.generator import group_prompt
from torchtitan_rl.generator.rollout import roll_out
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.trainer.packing import by_member, pack
from torchtitan_rl.types import Group, Member, Normalizers, ScoredCompletion

QUESTION = "Write the word done into the file answer.txt."
COUNTS = Normalizers(num_tokens=1, num_sequences=1, num_groups=1, max_completion_tokens=4000)


class CodingAgent(NamedTuple):
    """A coding agent: its packages, the shell command that starts it, and the policy's call of its shell."""

    packages: str
    command: str
    call: str
    env: dict[str, str] = {}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


WRITE = '"command": "echo done > answer.txt"'
OPENCODE = """{"model": "run/policy", "provider": {"run": {"npm": "@ai-sdk/openai-compatible", "models": {"policy": {}},
"options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}}}}"""
PI = """mkdir -p ~/.pi/agent; cat > ~/.pi/agent/models.json <<END
{"providers": {"run": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "$OPENAI_API_KEY",
"models": [{"id": "policy"}]}}}
END
"""
AGENTS = {
    "claude": CodingAgent(
        "npm @anthropic-ai/claude-code@2.1.332",
        'claude -p "$QUESTION" --allowedTools Bash',
        call("Bash", f'{{{WRITE}, "description": "write"}}'),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "codex": CodingAgent(
        "npm @openai/codex@0.171.0",
        """codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy \
-c model_provider=run \
-c "model_providers.run={name='run', base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY', wire_api='responses'}" "$QUESTION" """,
        call("exec_command", '{"cmd": "echo done > answer.txt"}'),
    ),
    "pi": CodingAgent(
        "npm @earendil-works/pi-coding-agent@1.6.0",
        PI + 'pi --offline --provider run --model policy -p "$QUESTION"',
        call("bash", f"{{{WRITE}}}"),
    ),
    "opencode": CodingAgent(
        "npm opencode-ai@1.18.33",
        'opencode run --auto "$QUESTION"',
        call("bash", f'{{{WRITE}, "description": "write"}}'),
        {"OPENCODE_CONFIG_CONTENT": OPENCODE, "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "qwen": CodingAgent(
        "npm @qwen-code/qwen-code@0.24.4",
        'qwen --auth-type openai -m policy -y -p "$QUESTION"',
        call("run_shell_command", f'{{{WRITE}, "description": "write", "is_background": false}}'),
    ),
    "cline": CodingAgent(
        "npm cline@3.0.65",
        'cline auth -p openai -k "$OPENAI_API_KEY" -b "$OPENAI_BASE_URL" -m policy >&2 && cline "$QUESTION"',
        call("run_commands", '{"commands": ["echo done > answer.txt"]}'),
    ),
    "aider": CodingAgent(
        "PyPI aider-chat==0.86.2",
        "OPENAI_API_BASE=$OPENAI_BASE_URL aider --model openai/policy --no-git --yes-always --no-check-update "
        '--no-show-model-warnings --edit-format whole --message "$QUESTION"',
        "answer.txt\n```\ndone\n```",
    ),
    "mini": CodingAgent(
        "PyPI mini-swe-agent==2.4.6 mcp",
        f"python {HERE}/mini_swe_agent.py",
        call("bash", f"{{{WRITE}}}"),
    ),
    "openhands": CodingAgent(
        "PyPI openhands-sdk==1.58.2 openhands-tools==1.58.2 (Python 3.12)",
        f"python {HERE}/openhands_agent.py",
        call("terminal", f"{{{WRITE}}}"),
    ),
}
SUBMIT = {"mini": call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done"}')}


class Writer(ScriptedEngine):
    """It calls the agent's shell in the first turn of a trace that knows it, then says that it is done."""

    def __init__(self, made, name: str, conversations: list[Conversation]) -> None:
        super().__init__(made)
        self._call, self._done = AGENTS[name].call, SUBMIT.get(name, "It is done.")
        found = re.search('"name": "(.*?)"', self._call)
        self._tool = f"{found[1]}(" if found else QUESTION  # as the chat template shows a tool
        self._conversations = conversations
        self.said: list[list[list[int]]] = [[] for _ in conversations]

    def step(self) -> list[Sampled]:
        indices, self.asked = self.asked, []
        return [self._turn(index) for index in indices]

    def _turn(self, index: int) -> Sampled:
        one = self._conversations[index]
        knows = self._tool in self.made.decode(one.context)
        text = self._call if knows and one.current not in {turn.trace for turn in one.turns} else self._done
        ids = self.made(text + self.made.eos_token)["input_ids"]
        self.said[index].append(ids)
        return Sampled(index, ids, [-0.5] * len(ids), text, "stop")


def agent_of(venvs: Path, name: str, question: str = QUESTION, *, after: str = "") -> AgentEnvironment:
    """The agent as a command, `after` which follows. Its environment has the packages' programs first."""
    agent = AGENTS[name]
    bins = [venvs / name / "node_modules/.bin", venvs / name / "bin", venvs / "node22/node_modules/.bin"]
    path = ":".join([*map(str, bins), "/usr/local/bin:/usr/bin:/bin"])
    env = {"PATH": path, "QUESTION": question, "PYTHONPATH": str(HERE), "LANG": "C.UTF-8", **agent.env}
    return AgentEnvironment(["bash", "-c", agent.command + after], task=question, env=env, role="tool")


def play(venvs: Path, name: str, made) -> tuple[list[Conversation], Writer]:
    """Two samples of one prompt."""
    [prompt] = prompts(made, 1)
    room = {"sampling": SamplingConfig(max_tokens=4000), "most_in_turn": 1000, "most_tokens": 400_000}
    group = [Conversation(prompt=prompt, sample_idx=i, **room) for i in range(2)]
    limits = {"on_failure": "none", "max_turns": 24, "call_seconds": 240, "max_answer_characters": 1_000_000}
    environments = conversations(lambda _: agent_of(venvs, name), made, **limits)
    policy, pool = Writer(made, name, group), environments.start(group, make_grammar=lambda *_, **__: None)
    try:
        list(roll_out(group, policy, pool, lambda value: value, wait_for_answers=False))
    finally:
        pool.close()
    return group, policy


def trained_once(group: list[Conversation], policy: Writer) -> bool:
    """Whether the packed group has in its loss exactly the tokens that the policy said, each trace those of its own turns."""
    prompt = group_prompt(group)
    scored = [ScoredCompletion(completion=one.completion(0, prompt), reward=float(i)) for i, one in enumerate(group)]
    [drafted] = draft_episodes([Group(prompt=prompt, samples=scored)])
    members = [Member.of(drafted, episode) for episode in drafted.samples]
    batch = pack(members, normalizers=COUNTS, multiple=1, share_prompts=True)
    labels = by_member(batch, batch.labels[batch.loss_positions].numpy())
    for one, said, trained in zip(group, policy.said, labels, strict=True):
        in_traces = sorted(range(len(said)), key=lambda i: one.turns[i].trace)
        if trained.tolist() != [token for i in in_traces for token in said[i]]:
            return False
    return True


def main(venvs: Path, names: list[str]) -> None:
    made = chat_tokenizer()
    for name in names or AGENTS:
        group, policy = play(venvs, name, made)
        equal = "one prompt" if len({one.prompt.text for one in group}) == 1 else "own prompts"
        exact = "exact" if trained_once(group, policy) else "NOT EXACT"
        for one in group:
            print(
                f"{name:10} sample {one.sample_idx}  {one.finish_reason:11} turns {len(one.turns)}  traces {len(one.traces)}  "
                f"{len(one.prompt.token_ids):6} prompt tokens  {equal}  {exact}",
                flush=True,
            )
            answers = [message["content"][-60:] for turn in one.turns for message in turn.messages]
            print(f"    answers: {answers}", flush=True)
            if one.error:
                print("    " + one.error[-800:].replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
