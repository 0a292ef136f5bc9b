"""Our side of step_vs_trl.py: one whole step of the Controller for each line on standard input.

Answers are JSON lines: {"seconds": ..., "cpu": ..., "phases": {...}, "lengths": [shortest, longest]}.
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

from configs.debug import debug  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.algorithm import Algorithm  # noqa: E402
from torchtitan_rl.controller import Controller  # noqa: E402
from torchtitan_rl.generator import SamplingConfig  # noqa: E402
from torchtitan_rl.run.rank_output import failure_marker  # noqa: E402
from torchtitan_rl.run.start import prepare_start  # noqa: E402
from torchtitan_rl.run.stop_signal import StopSignal  # noqa: E402
from torchtitan_rl.run.validation import check_model, validate  # noqa: E402


def config_of(job: dict) -> Controller.Config:
    """debug, with the job's model, lengths and dtypes; its task gives the prompts that TRL's side is handed as texts."""
    config = debug()
    config.model_spec, config.hf_assets_path = None, job["model"]
    config.dump_folder = job["folder"] + "/ours"
    config.num_steps = 100_000
    config.num_prompts_per_step = job["prompts_per_step"]
    config.sampling = SamplingConfig(n=job["n"], max_tokens=job["new_tokens"])
    config.generator.dtype = config.trainer.mixed_precision_param = job["ours"]["compute"]
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


def start(config: Controller.Config) -> Controller:
    """As train.py does it: in this process alone, or as one of torchrun's ranks."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29517")
    world_size = int(os.environ["WORLD_SIZE"])
    validate(config, world_size=world_size)
    prepare_start(config)
    check_model(config, world_size=world_size)
    comm.init_process_group(config.comm)
    folder = Path(config.dump_folder)
    controller = Controller(config, run_folder=folder, run_name="bench")
    controller.stop_signal = StopSignal(failure_marker=failure_marker(folder))  # of `run`, for its steps alone
    return controller


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    controller = start(config_of(job))
    controller.generator.end_token_ids = []  # every completion has the full length
    flush, values = controller.recorder.flush, {}
    controller.recorder.flush = lambda step: values.update(flush(step))
    print("{}", file=answers)  # ready
    for _ in sys.stdin:
        begin, processor = time.perf_counter(), time.process_time()
        controller.state.step += 1
        controller._train_step()
        took, cpu = time.perf_counter() - begin, time.process_time() - processor
        phases = {name: values[f"time/{name}"] for name in ("generate", "grade", "train", "sync")}
        phases["rest"] = took - sum(phases.values())
        lengths = [values[f"completions/length/{end}"] for end in ("min", "max")]
        print(json.dumps({"seconds": took, "cpu": cpu, "phases": phases, "lengths": lengths}), file=answers)
    controller.recorder.close()
    controller.close()


if __name__ == "__main__":
    main()
