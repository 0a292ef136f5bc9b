"""A program of an environment's own Python, which plays all conversations of one rank until its input ends.

It prints the messages of the training rows and of the held-out rows. Each connection to its socket plays one row.
"""

import asyncio
import itertools
import json
import os
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path


class Taskset:
    """An environment of verifiers 0.4. The arguments are the options that verifiers' command line has after --env."""

    def __init__(self, name, args, num_rows):
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils import loaders

        sys.path.append(str(Path(__file__).parent))  # verifiers imports a harness by its name
        seat = {"harness": {"id": "chat_harness"}, "runtime": {"type": "subprocess"}}
        config = loaders.env_config_type(name)
        for role, field in config.model_fields.items():
            if isinstance(field.default, AgentConfig):
                args[role] = seat | args.get(role, {})
        args["taskset"] = args.get("taskset", {}) | {"id": name}
        self._environment = loaders.load_environment(config.model_validate(args))
        tasks, self.serving = self._environment.taskset, self._environment.serving
        self.splits = [[*itertools.islice(tasks, None if tasks.bounded else num_rows)], []]

    def messages(self, task):
        opening = {"system": task.data.system_prompt, "user": task.data.prompt_text}
        return [{"role": role, "content": text} for role, text in opening.items() if text]

    async def play(self, task, base_url, key_variable):
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=base_url, api_key_var=key_variable)
        episode = await self._environment.run_episode(task, ModelContext("policy", client))
        for errors in (episode.errors, *(trace.errors for trace in episode.traces)):
            if errors:
                reason = f"{errors[0].type}: {errors[0].message}"
                if "ConnectionClosedOK" in reason:  # what OpenEnv's client says of it
                    why = "A server at its limit of sessions?"
                    reason += f". {why} Set --conversations.max-open to it"
                raise RuntimeError(reason)
        trace = episode.traces[0]
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
        return {"reward": trace.reward, "columns": scores | trace.metrics}


class Package:
    """An environment of verifiers 0.1: what the `load_environment` of a package returns. `sampling` is for its requests."""

    serving = AsyncExitStack

    def __init__(self, name, args, _):
        from verifiers import load_environment

        self._sampling = args.pop("sampling", {})
        self._environment = load_environment(name, **args)
        splits = (self._environment.build_dataset(), self._environment.build_eval_dataset())
        self.splits = [list(split or ()) for split in splits]

    def messages(self, row):
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    async def play(self, row, base_url, key_variable):
        from verifiers.types import ClientConfig

        client = ClientConfig(api_base_url=base_url, api_key_var=key_variable)
        output = await self._environment.run_rollout(row, client, "policy", self._sampling)
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        return {"reward": output["reward"], "columns": output["metrics"]}


async def serve(path, name, args, num_rows, printed):
    import verifiers

    kind = Package if hasattr(verifiers, "load_environment") else Taskset
    environment, numbers = kind(name, args, num_rows), itertools.count()
    rows = list(itertools.chain(*environment.splits))

    async def play(reader, writer):
        row, base_url, key = json.loads(await reader.readline())
        variable = f"POLICY_KEY_{next(numbers)}"  # verifiers reads keys of variables
        os.environ[variable] = key
        try:
            outcome = await environment.play(rows[row], base_url, variable)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        del os.environ[variable]
        writer.write(json.dumps(outcome).encode())
        writer.close()

    async with environment.serving(), await asyncio.start_unix_server(play, path, backlog=4096):
        messages = [list(map(environment.messages, split)) for split in environment.splits]
        print(json.dumps(messages, default=str), file=printed, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        shutil.rmtree(Path(path).parent)


if __name__ == "__main__":
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no row
    asyncio.run(serve(*json.loads(sys.argv[1]), printed))
