"""Loss and gradient of every objective must not depend on how the work is cut: micro-batches, FSDP ranks, tensor parallelism.

    torchrun --nproc_per_node=1 tests/integration/invariance.py --save FILE                     the reference: one rank, one micro-batch
    torchrun --nproc_per_node=4 tests/integration/invariance.py --tp 2 --compare FILE           the same on any layout
    torchrun --nproc_per_node=1 tests/integration/invariance.py --max-tokens 40 --compare FILE  and in many micro-batches

One `Trainer.update` a case on a tiny random Qwen3 with fixed episodes; the gradients are caught just before the optimizer.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torchtitan_rl import device  # noqa: E402, F401  (before torchtitan and vLLM)

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtitan.config import CommConfig  # noqa: E402

from tests.parts.tiny import change_adapters, save_tiny_checkpoint, tiny_spec  # noqa: E402
from tests.parts.tiny_trainer import catch_gradients, credited, tiny_trainer  # noqa: E402
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
from torchtitan_rl.algorithm.losses.distillation import ExactDistill  # noqa: E402
from torchtitan_rl.models.lora.lora_config import LoraConfig  # noqa: E402
from torchtitan_rl.trainer.teachers.exact_teacher import ExactTeacher  # noqa: E402
from torchtitan_rl.types import flat  # noqa: E402

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


def update(config: Algorithm.Config, folder: str, degrees: dict[str, int], max_tokens: int, rank: int) -> dict:
    """Norm of the gradient, controllers' state and full gradients, under Hugging Face names, of one update.

    With LoRA of `rank` the gradients are those of adapters with random values.
    """
    settings = {"max_tokens_per_microbatch": max_tokens, "max_norm": 1e9, "logprob_chunk_tokens": 7}
    lora = LoraConfig(rank=rank)
    trainer = tiny_trainer(folder, config, lora=lora, temperature=0.9, degrees=degrees, **settings)
    teacher = None
    if trainer.algorithm.policy_loss.needs_teacher:
        teacher = ExactTeacher(trainer, trainer.loader.frozen(tiny_spec(), Path(folder, "teacher")))
    change_adapters(trainer.model, 1)
    caught = catch_gradients(trainer)
    groups = credited(trainer)
    if trainer.algorithm.needs_reference:  # so that the divergence is not zero everywhere
        for episode in flat(groups):
            episode.reference_logprobs = episode.reference_logprobs - np.float32(0.3)
    report = trainer.update(groups, teacher)
    return {"norms": {"grad_norm": report.grad_norm}, "state": trainer.algorithm.state_dict(), "grads": caught}


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
    degrees = {"tensor_parallel_degree": args.tp, "data_parallel_replicate_degree": args.replicate}
    folder = comm.broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")
    if dist.get_rank() == 0:
        save_tiny_checkpoint(Path(folder))
        Path(folder, "teacher").mkdir()
        save_tiny_checkpoint(Path(folder, "teacher"), seed=1)
    comm.barrier()
    layout = (folder, degrees, args.max_tokens)
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
