"""Whole runs of decoders with transformers' layers: killed, resumed to the last bit, and exported."""

from pathlib import Path

import pytest
import torch

from tests.fault_injection.harness import metrics_of, start, steps_of, train, weights_of
from tests.integration.run_checks import sampler_agrees
from tests.integration.starts import odd
from tests.integration_tests import ANY_FOLDER, HYBRID
from tests.parts.multimodal import MULTIMODAL, save_multimodal
from torchtitan_rl.command.export import export
from torchtitan_rl.models.multimodal import is_text, stored_tensors

MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 24}
FAMILIES = {"gemma3_text": MIXED, "olmo2": {}, "qwen3_5_text": HYBRID}
"""{model_type: entries of config.json besides the odd dimensions}. Completions are longer than the windows."""

IN_BFLOAT16 = [
    "--generator.dtype", "bfloat16", "--trainer.logprob-gate.max-diff", "None",
]  # fmt: skip
"""For the engine of a model with linear layers, which has no other dtype on a CPU."""


@pytest.mark.parametrize("family", [*FAMILIES, *MULTIMODAL])
def test_killed_run_resumes_bitwise_and_its_export_has_the_same_logprobs(tmp_path, family):
    hybrid = family.lower().startswith("qwen3_5")
    deviation = 0.06 if hybrid else 0.15  # sharp distributions would show the engine's rounding
    if family in MULTIMODAL:
        sizes = {"vocab_size": 322, "max_position_embeddings": 2048, "initializer_range": deviation}
        save_multimodal(tmp_path / "start", family, tokenizer=True, **sizes)
    else:
        odd(family, initializer_range=deviation, **FAMILIES[family])(tmp_path)
    args = [arg.replace("{data}", str(tmp_path)) for arg in [*ANY_FOLDER, "--metrics.no-report"]]
    args += ["--num-steps", "4", "--checkpoint.interval", "1", "--sampling.max-tokens", "40"]
    args += ["--trainer.optimizer.lr", "1e-3", "--trainer.lr-scheduler.warmup-steps", "0"]
    args += IN_BFLOAT16 if hybrid else []
    whole = train(tmp_path, "--dump-folder", str(tmp_path / "whole"), base=args, log="whole.log", timeout_s=600)
    assert whole.code == 0, whole.output

    run = start(tmp_path, base=args, log="killed.log")
    run.wait_until(lambda: max(steps_of(tmp_path / "run"), default=0) >= 2, "save step 2", timeout_s=600)
    assert run.kill_everything().code == 137
    assert max(steps_of(tmp_path / "run")) < 4
    resumed = train(tmp_path, base=args, log="resumed.log", timeout_s=600)
    assert resumed.code == 0, resumed.output
    resumed.says("resuming after step [23]")
    assert list(metrics_of(tmp_path / "run")) == [1, 2, 3, 4]
    assert weights_of(tmp_path / "run", 4) == weights_of(tmp_path / "whole", 4)
    sampler_agrees()(tmp_path / "run")

    export(tmp_path / "run", tmp_path / "exported", None, "float32")
    assert export_difference(tmp_path) <= 2e-5
    if family in MULTIMODAL:
        before, after = stored(tmp_path / "start"), stored(tmp_path / "exported")
        assert after.keys() == before.keys()
        assert {name for name in after if torch.equal(after[name], before[name])} == {
            n for n in before if not is_text(n)
        }


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's files."""
    return {name: read() for name, read in stored_tensors(folder)}


def export_difference(folder) -> float:
    """The largest difference in log-probability between the last checkpoint's policy and the export in transformers."""
    from tests.parts.hf_decoders import backward, sequences, stored_policy, transformers_logprobs

    parts = sequences()
    policy = backward(stored_policy(folder / "start", folder / "run" / "checkpoint" / "step-4"), parts, 73)
    exported, _ = transformers_logprobs(folder / "exported", parts)
    before, _ = transformers_logprobs(folder / "start", parts)
    assert (exported - before).abs().max() > 0.01  # it was trained
    return float((policy - exported).abs().max())
