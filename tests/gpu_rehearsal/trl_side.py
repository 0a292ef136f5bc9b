"""Rehearses TRL's side of step_vs_trl.py as a GPU runs it: with its colocated vLLM, this environment's.

    .venv/bin/python tests/gpu_rehearsal/trl_side.py JOB.json      the job, lines and answers of side_trl.py

TRL, vLLM and their settings are those of a GPU; only what they compute with is a CPU.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/bench"))
import side_trl  # noqa: E402
import torch  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's packing: TRL loads weights into a layer's own, which a GPU's layer keeps."""
    layer.cpu_linear = torch.nn.functional.linear


def main() -> None:
    utils.dispatch_cpu_unquantized_gemm = keep_weights
    trainer_config = side_trl.GRPOConfig
    side_trl.GRPOConfig = lambda **options: trainer_config(use_cpu=True, **options)
    side_trl.torch = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: True), set_num_threads=torch.set_num_threads
    )
    side_trl.main()


if __name__ == "__main__":
    main()
