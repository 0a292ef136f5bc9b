"""A conversation of the run: one task of the taskset, played with the policy by verifiers' own chat loop, `null`."""

import asyncio
import json
import os
from pathlib import Path

import verifiers.v1 as vf
from my_words import Words

number = json.loads(Path(os.environ["AGENT_TASK"]).read_text())
[task] = Words(vf.TasksetConfig(id="my_words")).include(idx=[number])
policy = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
config = vf.AgentConfig(model="policy", client=policy, harness={"id": "null"}, runtime={"type": "subprocess"})
trace = asyncio.run(vf.Agent(config).run(task))
if not trace.ok:
    raise SystemExit(str(trace.errors))
Path(os.environ["AGENT_RESULT"]).write_text(json.dumps({"reward": trace.reward, "columns": trace.metrics}))
