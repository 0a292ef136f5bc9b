"""Our side of step_vs_trl.py: one whole step of the Controller for each line on standard input.

Answers are JSON lines: {"seconds": ..., "cpu": ..., "phases": {...}, "lengths": [shortest, mean, longest]}.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import torch  # noqa: E402

from torchtitan_rl.algorithm import Algorithm  # noqa: E402
from torchtitan_rl.build import build_run  # noqa: E402
from torchtitan_rl.command.registry import load_config  # noqa: E402
from torchtitan_rl.config import RunConfig  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402


def config_of(job: dict) -> RunConfig:
    """The job's config, with its model, lengths and dtypes; its task gives the prompts that TRL's side is handed as texts."""
    config = load_config(job["config"])
    config.hf_assets_path = job["model"]
    config.dump_folder = job["folder"] + "/ours"
    config.num_steps = 100_000
    config.num_prompts_per_step = job["prompts_per_step"]
    config.sampling = SamplingConfig(n=job["n"], max_tokens=job["new_tokens"])
    config.generator.dtype = config.trainer.mixed_precision_param = job["ours"]["compute"]
    config.generator.sleep = bool(job["ours"]["sleep"])
    config.generator.gpu_memory_utilization = job["ours"]["share"]
    config.generator.max_model_len = config.prompts.max_prompt_tokens + job["new_tokens"]
    config.trainer.max_tokens_per_microbatch = job["ours"]["tokens_at_once"]
    config.trainer.optimizer.lr = 1e-6
    config.trainer.logprob_gate.max_diff = None
    config.algorithm = Algorithm.Config()
    config.grader.rewards = [str(Path(__file__).with_name("made_up_reward.py")) + ":made_up"]
    config.evaluation.every = 0
    config.checkpoint.enable = False
    config.metrics.console_every = 0
    return config


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    config = config_of(job)
    controller = build_run(config, Path(config.dump_folder))
    controller.weight_sync.push(policy_version=0)
    if not job["ends"]:
        controller.generator.end_token_ids = []  # every completion has the full length
    recorder, values = controller.observer.recorder, {}
    flush = recorder.flush
    recorder.flush = lambda step: values.update(flush(step))
    print("{}", file=answers)  # ready
    for _ in sys.stdin:
        begin, processor = time.perf_counter(), time.process_time()
        controller.state.step += 1
        controller._step()
        took, cpu = time.perf_counter() - begin, time.process_time() - processor
        phases = {name: values[f"time/{name}"] for name in ("generate", "grade", "train", "sync")}
        phases["rest"] = took - sum(phases.values())
        lengths = [values[f"completions/length/{end}"] for end in ("min", "mean", "max")]
        print(json.dumps({"seconds": took, "cpu": cpu, "phases": phases, "lengths": lengths}), file=answers)
    recorder.close()
    controller.close()


if __name__ == "__main__":
    main()
