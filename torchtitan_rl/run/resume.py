"""Chooses the checkpoint that a run continues from, and compares its config with the run's."""

import functools
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.events import progress
from torchtitan_rl.fields.references import load_reward
from torchtitan_rl.models.hf_config import hf_architecture
from torchtitan_rl.replicated import check_config
from torchtitan_rl.run import manifest
from torchtitan_rl.run.checkpoint_folder import Resume, checkpoints_at, find_resume, is_choice
from torchtitan_rl.run.identity import identity, source_digest
from torchtitan_rl.run.secrets import without_secrets

if TYPE_CHECKING:
    from torchtitan_rl.algorithm import Algorithm
    from torchtitan_rl.config import RunConfig

BINDING = {
    "model_spec": "the weights are of another model",
    "tokenizer": "token ids stand for other text",
    "prompts": "its state is of another class's prompts",
    "task": "the data position belongs to other data",
    "seed": "the data position belongs to another order",
    "num_prompts_per_step": "steps, schedule and metrics count other batches",
    "sampling.n": "steps, schedule and metrics count other batches",
    "trainer.num_epochs": "optimizer steps and schedule count other updates",
    "trainer.num_minibatches": "optimizer steps and schedule count other updates",
    "trainer.lora": "the checkpoint holds other adapters, or none",
    "trainer.optimizer": "the optimizer's state is of another kind",
    "reference": "the KL term pulls towards other weights",
    "teacher": "the loss pulls towards another model",
    "more_teachers": "the loss pulls towards other models",
    "teacher_rate": "the checkpoint holds another average of the policy, or none",
    "teacher_hint": "the loss pulls towards another model",
    "algorithm": "its controllers' state and the meaning of the metrics are of another objective",
}
"""Fields whose change would make a resumed run silently wrong, and why."""
OF_STEPS = (
    "seed", "num_prompts_per_step", "sampling.n", "trainer.num_epochs", "trainer.num_minibatches",
)  # fmt: skip
"""Those of them that do not matter to `eval_only`, which makes no step."""
ONLY_TYPE = ("trainer.optimizer", "prompts")
"""Those of them of which only the class counts."""

DIGESTED_BYTES, DIGESTED_BLOCKS = 2**20, 64
"""The size of a block that `weights_digest` reads, and how many of them it reads of a file."""

_OF_THE_START = ("dump_folder", "resume", "resume_changed", "hf_assets_path")


def config_fields(config: "RunConfig", algorithm: "Algorithm") -> dict[str, Any]:
    """All fields of a config by dotted name, and the type of each component. Runs are compared by these.

    Example: {"algorithm.loss": "Clip", "algorithm.loss.eps_low": 0.2, "seed": 0, ...}
    """
    fields: dict[str, Any] = {}
    _describe("", config, fields)
    folder = Path(config.hf_assets_path)
    fields["tokenizer"] = _tokenizer_digest(folder)
    # Their weights count, not where they are.
    fields["teacher"] = weights_digest(Path(config.teacher)) if config.teacher else "none"
    more = {name: weights_digest(Path(place)) for name, place in config.more_teachers.items()}
    fields["more_teachers"] = str(more)
    fields["reference"] = weights_digest(folder) if algorithm.needs_reference else "none"
    for name, function in map(load_reward, config.grader.rewards):
        if source := source_digest(function):
            fields[f"grader.rewards: source of {name}"] = source
    for name in ("", *_OF_THE_START):
        del fields[name]
    return without_secrets(fields)


def _describe(name: str, value: Any, fields: dict[str, Any]) -> None:
    if isinstance(value, ModelSpec):
        fields[name] = f"{value.name} {value.flavor}"
        fields |= {f"{name}.{key}": entry for key, entry in hf_architecture(value.model).items()}
    elif is_dataclass(value):
        fields[name] = identity(value)
        for field in fields_of(value):
            _describe(f"{name}.{field.name}".removeprefix("."), getattr(value, field.name), fields)
    elif isinstance(value, dict) and any(map(is_dataclass, value.values())):  # of a mixture
        fields[f"{name} (names)"] = ", ".join(value)
        for key, part in value.items():
            _describe(f"{name}.{key}", part, fields)
    else:
        value = sorted(value) if isinstance(value, (set, frozenset)) else value
        plain = value is None or isinstance(value, (bool, int, float, str))
        fields[name] = value if plain else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _tokenizer_digest(folder: Path) -> str:
    files = [file for file in sorted(folder.glob("tokenizer*")) if file.is_file()]
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()[:16]


@functools.cache
def weights_digest(folder: Path) -> str:
    """A digest of a checkpoint's weights: of 64 MiB of each file, evenly spread, which takes about 0.1 s a file.

    Any further training of a model changes nearly all its weights.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for begin in range(0, size, max(DIGESTED_BYTES, size // DIGESTED_BLOCKS)):
                file.seek(begin)
                digest.update(file.read(DIGESTED_BYTES))
    return digest.hexdigest()[:16]


def prompts_date(config: "RunConfig") -> str:
    """Returns `prompts.date`, or else that of the newest checkpoint that the run goes on from, or else today's."""
    if config.prompts.date:
        return config.prompts.date
    fork = [] if is_choice(config.resume) else [config.resume]
    for folder in filter(None, [config.dump_folder, *fork]):
        for checkpoint in reversed(checkpoints_at(Path(folder)).values()):
            with suppress(UserError, KeyError):  # of a damaged one, which is skipped
                return manifest.read(checkpoint)["config"]["prompts.date"]
    return str(datetime.now().date())


def agreed_fields(config: "RunConfig", algorithm: "Algorithm") -> dict[str, Any]:
    """Returns `config_fields`. Raises UserError, on every rank, unless all ranks have the same, and the same weights. Collective."""
    fields = config_fields(config, algorithm)
    weights = {"hf_assets_path (its weights)": weights_digest(Path(config.hf_assets_path))}
    check_config(fields | weights)
    return fields


def choose_resume(config: "RunConfig", fields: dict[str, Any], run_folder: Path) -> Resume | None:
    """Find the checkpoint to resume from, None for a new run, and print what was skipped and what changed. Writes nothing. For rank 0.

    Raises UserError if no checkpoint can be used, or if a binding field of the config has changed.
    """
    choice = config.resume
    # A job that Slurm has restarted goes on, whatever step --resume says, or never.
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and is_choice(choice):
        choice = "auto"
    resume = find_resume(choice, run_folder)
    if resume is not None:
        return _accepted(resume, config, fields)
    if (run_folder / "metrics.jsonl").is_file():
        progress(f"{run_folder} has steps and no checkpoint: the run begins again at step 1")
    return resume


def _accepted(resume: Resume, config: "RunConfig", now: dict[str, Any]) -> Resume:
    """Compare the config, whose fields are `now`, with the checkpoint's. Returns `resume` with what changed."""
    for reason in resume.skipped:
        progress(f"skipped {reason}")
    done = f"at least {resume.step}, the steps done at {resume.checkpoint.name}"
    remedy = "Raise it, or --resume an earlier step."
    expect(config.num_steps >= resume.step, "num_steps", config.num_steps, done, remedy)
    then = manifest.read(resume.checkpoint)["config"]
    both = then.keys() & now.keys()
    both.discard("eval_only")
    changed = {n: f"{then[n]} -> {now[n]}" for n in sorted(both) if then[n] != now[n]}
    counted = [name for name in changed if not (config.eval_only and name in OF_STEPS)]
    binding = {name: why for name in counted if (why := _why_binding(name))}
    if binding and not config.resume_changed:
        named = "; ".join(f"{name} {changed[name]} ({why})" for name, why in binding.items())
        begin_anew = "" if resume.fork else "pass --dump-folder with a new folder, "
        raise UserError(
            f"resume = {config.resume!r}: this config is not the one of {resume.checkpoint.name}: {named}. Set it back, "
            f"{begin_anew}or accept it with --resume-changed."
        )
    if changed:
        named = "; ".join(f"{name} {change}" for name, change in changed.items())
        progress(f"changed since {resume.checkpoint.name}: {named}")
    if resume.fork:
        progress(f"forked from {resume.checkpoint}")
    return replace(resume, changed=changed)


def _why_binding(name: str) -> str:
    for field, why in BINDING.items():
        if name == field or (name.startswith(f"{field}.") and field not in ONLY_TYPE):
            return why
    return ""
