"""Loss and gradient of every objective must not depend on how the work is cut: micro-batches, FSDP ranks, tensor parallelism.

    torchrun --nproc_per_node=1 tests/integration/invariance.py --save FILE                     the reference: one rank, one micro-batch
    torchrun --nproc_per_node=4 tests/integration/invariance.py --tp 2 --compare FILE           the same on any layout
    torchrun --nproc_per_node=1 tests/integration/invariance.py --max-tokens 40 --compare FILE  and in many micro-batches

One `Trainer.update` a case on a tiny random Qwen3 with fixed episodes; the gradients are caught just before the optimizer.
"""

import argparse
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)
from torchtitan_rl.trainer.build_trainer import build_trainer  # noqa: E402
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.config import CommConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402

from tests.parts.tiny import change_adapters, save_tiny_checkpoint, tiny_spec  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.algorithm import (  # noqa: E402
    KL,
    Algorithm,
    Cispo,
    Clip,
    Gspo,
    MaxEnt,
    Reinforce,
    SeqMeanTokenMean,
    SeqSumConst,
    TauController,
    TokenTruncate,
)
from torchtitan_rl.algorithm.episodes import draft_episodes  # noqa: E402
from torchtitan_rl.algorithm.losses.distillation import ExactDistill  # noqa: E402
from torchtitan_rl.fields.lora_config import LoraConfig  # noqa: E402
from torchtitan_rl.models.hf import hf_weights  # noqa: E402
from torchtitan_rl.models.lora.adapters import Lora  # noqa: E402
from torchtitan_rl.trainer.teachers.frozen_models import Reference  # noqa: E402
from torchtitan_rl.trainer.trainer import Trainer  # noqa: E402
from torchtitan_rl.trainer.trainer_config import LogprobGateConfig  # noqa: E402
from torchtitan_rl.types import Completion, Group, Prompt, ScoredCompletion, TurnRecord, flat  # noqa: E402

MAX_TOKENS = 12
CASES = {
    "grpo": Algorithm.Config(aggregation=SeqMeanTokenMean.Config()),
    "dapo": Algorithm.Config(loss=Clip.Config(eps_high=0.28), mismatch=TokenTruncate.Config(), entropy_coef=0.01),
    "dr_grpo": Algorithm.Config(aggregation=SeqSumConst.Config()),
    "gspo": Algorithm.Config(loss=Gspo.Config(), aggregation=SeqMeanTokenMean.Config()),
    "cispo": Algorithm.Config(loss=Cispo.Config(), old_logprobs="sampler"),
    "reinforce": Algorithm.Config(loss=Reinforce.Config()),
    "kl": Algorithm.Config(kl=KL.Config(coef=0.1)),
    "turns": Algorithm.Config(credit="turn"),
    "maxent": Algorithm.Config(loss=MaxEnt.Config(clip_coef=0.5, tau_controller=TauController.Config(target=1.0))),
    "exact": Algorithm.Config(loss=ExactDistill.Config(beta=0.5), aggregation=SeqMeanTokenMean.Config()),
}


def scored_step(num_prompts: int = 5, n: int = 4) -> list[Group[ScoredCompletion]]:
    """A fixed step of random tokens, lengths and rewards, one group of which has no preference.

    Every third completion of some length is a conversation: tokens that the policy did not sample lie between two turns.
    """
    rng = random.Random(0)
    groups = []
    for idx in range(num_prompts):
        prompt_ids = [rng.randrange(1, 128) for _ in range(rng.randint(2, 6))]
        samples = []
        for sample in range(n):
            length = rng.randint(1, MAX_TOKENS)
            mask = [bool(sample % 3) or not 2 <= t < 5 for t in range(length)]
            lengths = [min(length, 2), length - 5] if sample % 3 == 0 and length > 5 else [sum(mask)]
            completion = Completion(
                sample_idx=sample,
                policy_version=0,
                token_ids=[rng.randrange(1, 128) for _ in range(length)],
                sampler_logprobs=[-rng.uniform(3, 7) if sampled else 0.0 for sampled in mask],
                loss_mask=mask,
                text="",
                finish_reason="stop",
                turns=tuple(TurnRecord(text="", num_tokens=n) for n in lengths),
            )
            reward = 0.5 if idx == 2 else float(rng.choice([-1, 0, 1]))
            earned = tuple(0.25 * place for place in range(len(lengths)))
            samples.append(ScoredCompletion(completion=completion, reward=reward, turn_rewards=earned))
        groups.append(
            Group(prompt=Prompt(prompt_idx=idx, text="", token_ids=prompt_ids, expected_answer=""), samples=samples)
        )
    return groups


def update(config: Algorithm.Config, folder: str, dims: ParallelDims, parallelism, max_tokens: int, rank: int) -> dict:
    """Norms of gradient and update, controllers' state and full gradients, under Hugging Face names, of one update.

    With LoRA of `rank` the gradients are those of adapters with random values.
    """
    lora = LoraConfig(rank=rank)
    algorithm = config.build(max_completion_tokens=MAX_TOKENS)
    trainer = build_trainer(
        Trainer.Config(
            logprob_gate=LogprobGateConfig(distribution=False),  # made-up log-probabilities are not the policy's
            parallelism=parallelism,
            max_tokens_per_microbatch=max_tokens,
            mixed_precision_param="float32",
            max_norm=1e9,
            logprob_chunk_tokens=7,
            lora=lora,
        ),
        model_spec=tiny_spec(),
        hf_assets_path=folder,
        parallel_dims=dims,
        algorithm=algorithm,
        num_steps=10,
        max_model_len=64,
        temperature=0.9,
        generator_dtype="bfloat16",
        dump_folder="",
        policy_lora=Lora.of(lora),
    )
    teacher = None
    if algorithm.policy_loss.needs_teacher:
        teacher = ExactTeacher(trainer, tiny_spec(), Path(folder, "teacher"))
    change_adapters(trainer.model, 1)
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        values = [p.detach().clone() for p in trained]
        with torch.no_grad():
            for p in trained:
                p.copy_(p.grad)
            weights = trainer.lora.weights if rank else partial(hf_weights, trainer.model, trainer.state_dict_adapter)
            caught.update({name: t.clone() for name, t in weights(torch.float32)})
            for p, value in zip(trained, values, strict=True):
                p.copy_(value)

    trainer.optimizer.optimizers[0].register_step_pre_hook(catch)
    groups = draft_episodes(scored_step())
    if algorithm.needs_reference:
        Reference(trainer).add_logprobs(groups)
    algorithm.credit.assign(groups)
    if algorithm.needs_reference:  # so that the divergence is not zero everywhere
        for episode in flat(groups):
            episode.reference_logprobs = episode.reference_logprobs - np.float32(0.3)
    report = trainer.update(groups, teacher)
    return {"norms": {"grad_norm": report.grad_norm}, "state": algorithm.state_dict(), "grads": caught}


def difference(found: dict, expected: dict) -> float:
    """The largest relative difference of gradients, norms and controller state."""
    grads = found["grads"], expected["grads"]
    total = torch.cat([t.flatten() for t in grads[1].values()]).norm()
    worst = max(float((grads[0][name] - t).norm() / total) for name, t in grads[1].items())
    worst = max(worst, *(abs(norm / expected["norms"][name] - 1) for name, norm in found["norms"].items()))
    states = _numbers(found["state"]), _numbers(expected["state"])
    assert len(states[0]) == len(states[1])
    return max([worst, *(abs(a - b) for a, b in zip(*states, strict=True))])


def _numbers(state: object) -> list[float]:
    """Every number in nested dicts, in order."""
    if isinstance(state, dict):
        return [x for key in sorted(state) for x in _numbers(state[key])]
    return [float(state)] if isinstance(state, (int, float)) else []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=100_000)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--compare", type=Path)
    args = parser.parse_args()
    comm.init_process_group(CommConfig(trace_buf_size=0))
    parallelism = ParallelismConfig(
        tensor_parallel_degree=args.tp, data_parallel_replicate_degree=args.replicate, spmd_backend="partial_dtensor"
    )
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    folder = comm.broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")
    if dist.get_rank() == 0:
        save_tiny_checkpoint(Path(folder))
        Path(folder, "teacher").mkdir()
        save_tiny_checkpoint(Path(folder, "teacher"), seed=1)
    comm.barrier()
    layout = (folder, dims, parallelism, args.max_tokens)
    results = {name: update(config, *layout, rank=0) for name, config in CASES.items()}
    results |= {f"{name} with LoRA": update(CASES[name], *layout, rank=8) for name in ("grpo", "kl", "exact")}
    failed = False
    if dist.get_rank() == 0 and args.save:
        torch.save(results, args.save)
    if dist.get_rank() == 0 and args.compare:
        expected = torch.load(args.compare)
        for name, result in results.items():
            diff = difference(result, expected[name])
            print(
                f"{name}: gradient norm {result['norms']['grad_norm']:.6f}, relative difference {diff:.1e}", flush=True
            )
            failed |= not diff < 1e-5
    comm.barrier()
    comm.close_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
