"""Whole runs on every layout, judged by their results: metrics, parity and files.

    .venv/bin/python tests/integration_tests.py [--quick] [--test_name NAME] [--ngpu 8] [--output_dir outputs/tests] [--list]

On a machine with GPUs the runs use them, and tests that need more ranks than it has are skipped; without, the same list runs
on up to 8 gloo ranks of the CPU. Small tests run side by side. What must agree, and how closely, depends on the run's dtype.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.fault_injection.harness import two_nodes  # noqa: E402
from tests.integration.run_checks import (  # noqa: E402
    accuracy_rises,
    ended_after_the_best,
    evaluation_is_reproduced,
    export_is_whole,
    exported_adapter_names_its_base,
    exported_model_equals_policy,
    files_exist,
    metrics_are_documented,
    optimizer_goes_on,
    parity_holds,
    records,
    reward_rises,
    same_step,
    sampled_as_transformers,
    sampler_agrees,
    shown_tokens_are_compared,
    steps_are,
)
from tests.integration.starts import arrivals_with_solutions, odd, published, two_bases  # noqa: E402

LORA = ["--trainer.lora.rank", "16", "--trainer.optimizer.lr", "1e-3"]
SHORT = ["--num-steps", "3", "--evaluation.every", "0", "--generator.enforce-eager"]
"""Too few steps for a GPU's engine to compile for."""
BFLOAT16 = [
    "--generator.dtype", "bfloat16", "--trainer.mixed-precision-param", "bfloat16",
    "--trainer.logprob-gate.max-diff", "None",
]  # fmt: skip
ANY_FOLDER = [
    "--config", "sums", "--hf-assets-path", "{data}/start", *SHORT, "--num-steps", "2", "--num-prompts-per-step", "8",
    "--sampling.n", "4", "--sampling.max-tokens", "24",
    "--generator.max-model-len", "512", "--generator.dtype", "float32",
    "--trainer.mixed-precision-param", "float32", "--trainer.logprob-gate.max-diff", "1e-3",
    "--grader.rewards", "torchtitan_rl.rewards:script(name='latin')",
]  # fmt: skip
"""Training whatever model is in the folder `start` of the test's data, in float32, on a reward that random text differs in."""
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}  # fmt: skip
"""Entries of a small Qwen3.5's config.json."""
LEARNS = [
    "--generator.dtype", "bfloat16", "--trainer.logprob-gate.max-diff", "None",
    "--num-steps", "24", "--num-prompts-per-step", "16", "--trainer.optimizer.lr", "3e-3", "--trainer.lr-scheduler.warmup-steps", "0",
    "--grader.rewards", "torchtitan_rl.rewards:regex('[0-9]')",
]  # fmt: skip
LORA_RUN = [*ANY_FOLDER, "--trainer.lora.rank", "4", "--checkpoint.interval", "1"]
TALK = "tests/parts/talk.py"
TRL = {
    "accuracy_reward": "", "think_format_reward": "", "get_repetition_penalty_reward": "(ngram_size=2)",
    "get_soft_overlong_punishment": "(max_completion_len=48, soft_punish_cache=24)",
}  # fmt: skip
"""Reward functions and factories that TRL publishes."""
TP2 = ["--trainer.parallelism.tensor-parallel-degree", "2"]
KILLED = [
    "--config", "debug", *SHORT, "--checkpoint.interval", "1", "--grader.rewards", "tests/fault_injection/rewards.py:is_killed",
    "--grader.in-process", "is_killed",
]  # fmt: skip
"""A run that loses its fifth rank in step 2, if five or more are on one node."""
TP4 = ["--generator.tensor-parallel-degree", "4"]
LAYOUT = 1e-4
"""The most by which a step in float32 may differ on another layout, relative to each number."""
OWN_CONFIG = [
    "--hf-assets-path", "{data}/start", *SHORT, "--num-steps", "2", "--num-prompts-per-step", "8", "--sampling.n", "4",
    "--sampling.max-tokens", "16", "--grader.rewards", "tests/parts/even_ids.py:even", "--metrics.select", "random:16",
]  # fmt: skip
"""Few short completions, with the layout, dtypes and everything else of the config."""
IN_FLIGHT = [
    "--config", "debug", "--in-flight.prompts", "24", "--algorithm.old-logprobs", "sampler", "--evaluation.every", "0",
    "--trainer.lr-scheduler.warmup-steps", "0", "--trainer.lr-scheduler.decay-ratio", "0",
]  # fmt: skip
"""Groups in flight; the ratio's denominator is the sampler's, which corrects the tokens of older weights."""
REPLAY = [
    "--generator.router-replay", "--in-flight.prompts", "12", "--num-prompts-per-step", "8", "--algorithm.old-logprobs",
    "sampler", "--evaluation.every", "0",
]  # fmt: skip
TALK_IN_FLIGHT = ["--in-flight.prompts", "8", "--algorithm.old-logprobs", "sampler", "--evaluation.every", "0"]
CARRIED = {"in_flight/carried_tokens_fraction": 0, "in_flight/groups": 7}
TURNS = {"conversations/turns/max": 1}
"""Metrics that show that a run did what is tested, and what they exceed."""
GOES_ON = same_step(4, "straight", "resumed", above=TURNS)
EXACT = [["--dtype", "float32"], ["--dtype", "bfloat16"]]
TOLD = "tests/parts/told_sums.py"
OWN_LOOP = ["--steps", "2", "--prompts", "4", "--samples", "4", "--held-out", "8", "--output", "{dir}/trained"]
SFT = [
    "--config", "debug_sft", "--evaluation.sampling.n", "0", "--evaluation.every", "2", "--evaluation.num-prompts", "32",
]  # fmt: skip
AHEAD = ["--generator.ahead", "1", "--algorithm.old-logprobs", "sampler"]
EVALUATED = ["--evaluation.every", "2", "--evaluation.num-prompts", "32"]
OWN = [*SHORT, *EVALUATED]
PROBED = ["--checkpoint.interval", "2", "--weight-sync.check-interval", "1"]
"""A checkpoint right after a weight sync that was probed, as every fiftieth is."""


@dataclass
class OverrideDefinitions:
    """One test: the command lines it runs one after another, and what must be true of the run folder afterwards."""

    override_args: Sequence[Sequence[str]]
    """Arguments of each run; {dir} stands for the test's own folder."""
    test_descr: str
    test_name: str
    ngpu: int | Sequence[int] = 1
    """Ranks of each run; the last repeats."""
    checks: Sequence[Callable[[Path], None]] = ()
    """Called with the run folder after the last run; raise AssertionError."""
    program: str = "torchtitan_rl.command.train"
    exit_codes: Sequence[int] = field(default_factory=lambda: [0])
    """What each run must exit with; the last repeats."""
    expect_output: Sequence[str] = ()
    """Texts that the last run must print."""
    prepare: Callable[[Path], None] | None = None
    """Called with the folder of the test's data, {data} in arguments, before the first run."""
    nodes: Sequence[int] = (1,)
    """Launchers, on this machine, that share the ranks of each run; the last repeats."""
    quick: bool = False
    """In the default test command; the others are run by `scripts/run_tests.sh all`."""


def run(*args: str) -> list[str]:
    """Arguments of one run in the test's folder."""
    return ["--dump-folder", "{dir}", *args]


def debug(*args: str) -> list[str]:
    """Arguments of three steps of `debug`, unless `args` say otherwise, in the test's folder."""
    return run("--config", "debug", *SHORT, *args)


def forked(*args: str, steps: int) -> list[list[str]]:
    """Arguments of a run `straight` and of its `fork`, which begins from the checkpoint in the middle."""
    both = [*args, "--num-steps", str(steps), "--checkpoint.interval", str(steps // 2)]
    fork = ["--resume", f"{{dir}}/straight/checkpoint/step-{steps // 2}"]
    return [[*both, "--dump-folder", "{dir}/straight"], [*both, "--dump-folder", "{dir}/fork", *fork]]


def resumed(*args: str, steps: int = 4) -> list[list[str]]:
    """Arguments of a run `straight`, and of `resumed`, which ends in the middle and then goes on."""
    parts = ((steps, "straight"), (steps // 2, "resumed"), (steps, "resumed"))
    return [[*args, "--num-steps", str(last), "--dump-folder", f"{{dir}}/{name}"] for last, name in parts]


def parity(name: str, ngpu: int, description: str, *args: str) -> OverrideDefinitions:
    """One layout of tests/integration/parity.py."""
    command = ["--output", "{dir}/parity.json", *args]
    return OverrideDefinitions([command], description, name, ngpu, [parity_holds], "tests.integration.parity")


def build_test_list() -> list[OverrideDefinitions]:
    """Every integration test, the shortest first."""
    checked_run = [steps_are(3), sampler_agrees(), files_exist("config.json", "environment.json", "tensorboard/*")]
    return [
        parity("parity_1", 1, "policy, transformers and engine agree in one process"),
        parity("parity_bf16", 1, "the same in bfloat16, to its rounding", "--dtype", "bfloat16"),
        OverrideDefinitions(
            EXACT, "weights that did not arrive: each fault is caught at the first push with the tensor's name", "sabotage",
            1, [], "tests.integration.sabotage", quick=True,
        ),
        OverrideDefinitions(
            [[*dtype, "--generator-tp", "2"] for dtype in EXACT], "the same with a generator of TP 2", "sabotage_tp2", 2, [], "tests.integration.sabotage",
        ),
        OverrideDefinitions(
            [[*dtype, "--generator-ranks", "2"] for dtype in EXACT],
            "the same with engines on other ranks", "sabotage_own_generators", 4, [], "tests.integration.sabotage",
        ),
        OverrideDefinitions(
            [
                ["--generator-tp", "2"], ["--tp", "2"], ["--dtype", "bfloat16"],
                ["--rank", "1", "--targets", "qkv_proj", "up_proj", "down_proj"],
            ],
            "LoRA: three pushes, then each fault of an adapter caught by name", "lora_sync", 2, [], "tests.integration.lora_sync",
        ),
        OverrideDefinitions(
            [["--tp", "2", "--generator-tp", "4"]], "LoRA: the same on FSDP 4 x TP 2, with engines of TP 4", "lora_sync_8", 8, [],
            "tests.integration.lora_sync",
        ),
        OverrideDefinitions(
            [["qwen3_moe", "--no-engine"], ["qwen3_moe", "--no-engine", "--expert-parallel", "2"]],
            "experts on FSDP 2, and shared by 2 ranks, have the gradients of one process", "experts_layouts", 2, [],
            "tests.integration.hf_decoders", quick=True,
        ),
        OverrideDefinitions(
            [["qwen3_moe", "--generator-tp", "2", "--expert-parallel", "8"]], "the same shared by 8 ranks, pushed into engines of TP 2",
            "experts_ep8", 8, [], "tests.integration.hf_decoders",
        ),
        OverrideDefinitions(
            [run("--config", "debug_moe")], "a mixture of experts: accuracy rises",
            "debug_moe", 1, [steps_are(50), sampler_agrees(1e-3), accuracy_rises(0.30, 0.90), exported_model_equals_policy],
        ),
        OverrideDefinitions(
            forked("--config", "debug_moe", *REPLAY, steps=4), "router replay with carried groups: a fork goes on to the last bit",
            "router_replay", 1,
            [same_step(4, "straight", "fork", above={"in_flight/carried_tokens_fraction": 0, "moe/replayed": 0.5})],
        ),
        OverrideDefinitions(
            [run("--config", "debug", *LORA),
             ["--config", "debug", *LORA, "--dump-folder", "{dir}/alone", "--resume", "{dir}", "--eval-only"]],
            "LoRA: accuracy rises, and a fork on 2 ranks gives the very same evaluation", "debug_lora", [1, 2],
            [steps_are(50), sampler_agrees(1e-3), accuracy_rises(0.30, 0.98), evaluation_is_reproduced],
        ),
        OverrideDefinitions(
            [[*LORA_RUN, "--dump-folder", "{dir}/run"],
             [*LORA_RUN, "--dump-folder", "{dir}/fork", "--resume", "{dir}/run/checkpoint/step-1"],
             [*LORA_RUN, "--dump-folder", "{dir}/run", "--num-steps", "3", "--hf-assets-path", "{data}/other"]],
            "LoRA: a fork goes on as the run did, and another base is refused by name", "lora_runs", 1,
            [same_step(2, "run", "fork")], prepare=two_bases, exit_codes=[0, 0, 2],
            expect_output=["hf_assets_path = 'a base with digest"],
        ),
        OverrideDefinitions(
            resumed("--config", f"{TALK}:talk", "--trainer.lora.rank", "4"),
            "LoRA: conversations go on after a resume to the last bit", "lora_conversations", 1,
            [GOES_ON, exported_adapter_names_its_base("straight")],
        ),
        parity("parity_tp2_untied", 2, "parity with TP 2, untied embeddings", "--tp", "2", "--untied"),
        parity(
            "parity_llama", 2, "parity of Llama 3 with its rope scaling, TP 2", "--architecture", "llama", "--tp", "2", "--untied"
        ),
        parity(
            "parity_qwen2", 2, "parity of Qwen2.5 with its biases, TP 2 on both sides",
            "--architecture", "qwen2", "--tp", "2", "--generator-tp", "2",
        ),
        parity(
            "parity_fsdp2_tp2_gen2", 4, "parity with FSDP 2 x TP 2 and generator TP 2", "--tp", "2", "--generator-tp", "2"
        ),
        parity("parity_fsdp4_tp2_gen4", 8, "parity with FSDP 4 x TP 2, engines of TP 4", "--tp", "2", "--generator-tp", "4"),
        parity(
            "parity_hsdp_bf16", 8, "parity in bfloat16 with HSDP 2 x 4 and one engine of TP 8",
            "--replicate", "2", "--generator-tp", "8", "--dtype", "bfloat16",
        ),
        OverrideDefinitions(
            [["--save", "{dir}/one.pt"], ["--tp", "2", "--max-tokens", "64", "--compare", "{dir}/one.pt"]],
            "every objective's loss, gradient and update on 1 rank and on FSDP 2 x TP 2 in many micro-batches",
            "invariance", [1, 4], [], "tests.integration.invariance", quick=True,
        ),
        OverrideDefinitions(
            [["--save", "{dir}/one.pt"], ["--max-tokens", "40", "--compare", "{dir}/one.pt"], ["--compare", "{dir}/one.pt"],
             ["--replicate", "2", "--compare", "{dir}/one.pt"]],
            "the same in many micro-batches on 1 rank, with FSDP 8, and with HSDP 2 x 4", "invariance_layouts", [1, 1, 8, 8], [],
            "tests.integration.invariance",
        ),
        OverrideDefinitions(
            [run("--config", "debug")], "the README's run: accuracy rises", "debug", 1,
            [steps_are(50), sampler_agrees(1e-3), accuracy_rises(0.30, 0.90), exported_model_equals_policy], quick=True,
        ),
        OverrideDefinitions(
            [debug("--num-steps", "4", *BFLOAT16)], "training in bfloat16", "debug_bf16", 1, [steps_are(4), sampler_agrees()],
        ),
        OverrideDefinitions(
            [debug("--num-steps", "2", "--checkpoint.interval", "1"),
             debug("--num-steps", "4", "--trainer.optimizer.weight-decay", "1e300"), debug("--num-steps", "4")],
            "NaN ends the run before a checkpoint holds it, and the last good one goes on", "nan", 1,
            [steps_are(4), sampler_agrees()], exit_codes=[0, 3, 0],
        ),
        OverrideDefinitions(
            [debug("--checkpoint.interval", "2"), debug("--num-steps", "5")], "a run resumes at the next step, once", "resume", 1,
            [steps_are(5), sampler_agrees()],
        ),
        OverrideDefinitions(
            [run("--config", "tests/parts/mixture.py:two_tasks", *SHORT, "--num-steps", "2", "--checkpoint.interval", "1"),
             run("--config", "tests/parts/mixture.py:two_tasks", *SHORT, "--num-steps", "4")],
            "a mixture of a file's rows and sums, each sampled and scored its own way, goes on on 2 ranks", "mixture", [1, 2],
            [steps_are(4), sampler_agrees(), records("train/rows/reward", "train/sums/accuracy", "optimizer/epoch")],
        ),
        OverrideDefinitions(
            [run("--config", "debug_rows", "--task.path", "{data}/rows.jsonl", *SHORT,
                 "--grader.rewards", *(f"trl.rewards:{name}{arguments}" for name, arguments in TRL.items()))],
            "a file of chat messages, scored by TRL's reward functions as they are", "data_trl_rewards", 1,
            [steps_are(3), sampler_agrees(), records(*(f"reward/{name}/mean" for name in TRL))],
            prepare=arrivals_with_solutions,
        ),
        OverrideDefinitions(
            [run("--config", "debug", "--num-steps", "50", "--evaluation.every", "5", "--evaluation.num-prompts", "32",
                 "--evaluation.best-by", "evaluation/accuracy", "--evaluation.stop-after", "2")] * 2,
            "the best checkpoint is kept, a run that becomes no better ends, and the same command adds nothing",
            "data_stop_after", 1, [ended_after_the_best(10)],
            expect_output=["evaluation/accuracy stopped improving"],
        ),
        OverrideDefinitions(
            [debug("--num-steps", "2", *PROBED, "--metrics.select", "random:16"), debug("--num-steps", "4", *PROBED, *TP2)],
            "a run of FSDP 2 goes on under TP 2", "resume_layouts", 2,
            [steps_are(4), sampler_agrees(), optimizer_goes_on, shown_tokens_are_compared], quick=True,
        ),
        OverrideDefinitions(
            [run(*ANY_FOLDER, *LEARNS)], "a Qwen3.5 of odd dimensions learns to write digits and is exported",
            "data_qwen3_5", [1, 2], [steps_are(24), reward_rises(0.2), sampler_agrees(), export_is_whole],
            prepare=odd("qwen3_5_text", **HYBRID, initializer_range=0.1),
        ),
        OverrideDefinitions(
            [run(*ANY_FOLDER, "--checkpoint.interval", "1"), run(*ANY_FOLDER, "--num-steps", "3", *TP2)],
            "a Llama 3 of odd dimensions is trained from its folder alone, goes on under TP 2 and is exported",
            "any_folder", [1, 2], [steps_are(3), sampler_agrees(), export_is_whole], prepare=odd("llama"),
        ),
        OverrideDefinitions(
            [run(*ANY_FOLDER, "--checkpoint.interval", "1", "--trainer.parallelism.expert-parallel-degree", "2"),
             run(*ANY_FOLDER, "--num-steps", "3")],
            "a mixture of experts, which 2 ranks share, is trained from its folder alone, goes on with FSDP 2 and is exported",
            "experts_folder", 2, [steps_are(3), sampler_agrees(), export_is_whole],
            prepare=odd("qwen3_moe", hidden_size=96, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40),
        ),
        OverrideDefinitions(
            forked("--config", f"{TALK}:talk", steps=4), "a fork's conversations go on as the run's, to the last bit", "conversations", 1,
            [same_step(4, "straight", "fork", above=TURNS)], quick=True,
        ),
        OverrideDefinitions(
            resumed("--config", f"{TALK}:talk_agent"), "conversations with agents go on after a resume to the last bit", "agents", 1,
            [GOES_ON],
        ),
        OverrideDefinitions(
            resumed("--config", f"{TALK}:talk_traces"),
            "rollouts of several traces: trainer and sampler agree, and they go on after a resume to the last bit", "traces", 1,
            [GOES_ON],
        ),
        OverrideDefinitions(
            [["--config", f"{TALK}:talk_maxent", "--num-steps", "2", "--dump-folder", "{dir}/maxent"],
             *resumed("--config", f"{TALK}:talk_dapo")],
            "the same on 2 ranks, with replaced groups, a length penalty and a reference; and a listwise loss", "conversations_2", 2,
            [GOES_ON],
        ),
        OverrideDefinitions(
            resumed(*IN_FLIGHT, steps=6), "groups in flight go on after a resume to the last bit", "in_flight", 1,
            [same_step(6, "straight", "resumed", above=CARRIED)],
        ),
        OverrideDefinitions(
            resumed("--config", f"{TALK}:talk_traces", *TALK_IN_FLIGHT, steps=6),
            "conversations of several traces in flight go on after a resume to the last bit", "conversations_in_flight", 1,
            [same_step(6, "straight", "resumed", above=TURNS | {"in_flight/carried_tokens_fraction": 0})],
        ),
        OverrideDefinitions(
            forked("--config", f"{TALK}:talk", *TALK_IN_FLIGHT, "--generator.tensor-parallel-degree", "2", steps=6),
            "a fork's conversations in flight go on as the run's, with an engine on 2 ranks", "conversations_in_flight_tp2", 2,
            [same_step(6, "straight", "fork", above=TURNS | {"in_flight/carried_tokens_fraction": 0})],
        ),
        OverrideDefinitions(
            forked(*IN_FLIGHT, steps=6),
            "a fork's groups in flight go on as the run's on 2 ranks", "in_flight_2", 2,
            [same_step(6, "straight", "fork", above=CARRIED)],
        ),
        OverrideDefinitions(
            [["--config", "debug", *OWN, "--dump-folder", "{dir}/near"],
             ["--config", "debug", *OWN, "--dump-folder", "{dir}/far", "--generator.ranks", "2"]],
            "generators on ranks of their own sample as colocated ones", "own_generators", [2, 4],
            [same_step(3, "near", "far")], quick=True,
        ),
        OverrideDefinitions(
            [["--config", "debug", *OWN, *LORA, "--dump-folder", "{dir}/near", "--generator.tensor-parallel-degree", "2"],
             ["--config", "debug", *OWN, *LORA, "--dump-folder", "{dir}/far", "--generator.ranks", "4",
              "--generator.tensor-parallel-degree", "2"]],
            "LoRA: the same on 4 + 4 ranks, with engines of TP 2", "own_generators_tp2", [4, 8],
            [same_step(3, "near", "far")],
        ),
        OverrideDefinitions(
            forked("--config", "debug", "--evaluation.every", "0", "--generator.ranks", "2", *AHEAD, steps=4),
            "one step ahead: a fork on 6 + 2 ranks goes on as the run on 1 + 2", "own_generators_ahead", [3, 8],
            [same_step(4, "straight", "fork", rel=LAYOUT)],
        ),
        OverrideDefinitions(
            forked("--config", "debug", "--evaluation.every", "0", "--generator.ranks", "4", *AHEAD, steps=4),
            "the same on 4 + 4 ranks as on 1 + 4", "own_generators_ahead_4", [5, 8],
            [same_step(4, "straight", "fork", rel=LAYOUT)],
        ),
        OverrideDefinitions(
            forked("--config", f"{TALK}:talk", *TALK_IN_FLIGHT, "--generator.ranks", "1", *AHEAD, steps=6),
            "one step ahead, with conversations in flight", "own_generators_talk", 2,
            [same_step(6, "straight", "fork", above=TURNS | {"in_flight/carried_tokens_fraction": 0})],
        ),
        OverrideDefinitions(
            [["--config", "debug", *SHORT, "--generator.dtype", "bfloat16", "--trainer.mixed-precision-param", "bfloat16",
              "--generator.ranks", "1", *AHEAD, "--dump-folder", "{dir}"]],
            "a mismatch is explained while the generators are a step ahead", "own_generators_mismatch", 2,
            exit_codes=[3], expect_output=["Its weights are the policy's, bit for bit (compared now), so they are not the cause."],
        ),
        OverrideDefinitions(
            forked(*SFT, steps=4), "a fork's demonstrations go on as the run's, without an engine", "demonstrations", 1,
            [same_step(4, "straight", "fork", above={"evaluation/loss": 0})],
        ),
        OverrideDefinitions(
            forked(*SFT, "--trainer.lora.rank", "4", steps=4), "the same with LoRA on 2 ranks", "demonstrations_2", 2,
            [same_step(4, "straight", "fork", above={"evaluation/loss": 0})],
        ),
        OverrideDefinitions(
            forked("--config", "debug_distill", "--evaluation.every", "0", "--metrics.select", "random:16", steps=4),
            "a fork learns from its teacher as the run does, on 2 ranks", "distillation", 2,
            [same_step(4, "straight", "fork", above={"teacher/divergence": 0}),
             lambda folder: shown_tokens_are_compared(folder / "straight")],
        ),
        OverrideDefinitions(
            forked("--config", f"{TOLD}:self_taught", "--evaluation.every", "0", steps=4),
            "a fork goes on with the average that teaches it, on 2 ranks", "self_taught_fork", 2,
            [same_step(4, "straight", "fork", above={"teacher/divergence": 0.01, "teacher/hinted_fraction": 0.99})],
        ),
        OverrideDefinitions(
            [run("--config", f"{TOLD}:self_taught")], "hints teach what no reward does", "self_taught", 1,
            [steps_are(20), sampler_agrees(1e-3), accuracy_rises(0.20, 0.80)],
        ),
        OverrideDefinitions(
            [debug("--num-steps", "1")], "a step in float32 without an operation in bfloat16",
            "no_bfloat16", 1, [steps_are(1)], "tests.integration.no_bfloat16", quick=True,
        ),
        OverrideDefinitions(
            [OWN_LOOP], "a loop of one's own over the parts", "own_loop", 1, [files_exist("trained/model.safetensors")],
            "examples.grpo_minimal", expect_output=["step   2  reward", "held-out sums that are right"], quick=True,
        ),
        OverrideDefinitions(
            [run("--config", "debug", "--sampling.n", "1")], "wrong input: one message and exit code 2", "wrong_input", 2,
            exit_codes=[2], expect_output=["error: sampling.n = 1: expected at least 2"], quick=True,
        ),
        OverrideDefinitions(
            [debug("--trainer.logprob-gate.max-diff", "1e-12")], "a sampler that is not the policy stops the run before an update",
            "gate", 2, exit_codes=[3], expect_output=["stopped: sampler/logprob_diff/max"],
        ),
        OverrideDefinitions([debug()], "FSDP 2", "debug_fsdp2", 2, checked_run),
        OverrideDefinitions(
            [debug(*TP2, "--generator.tensor-parallel-degree", "2")], "FSDP 2 x TP 2, generator TP 2", "debug_fsdp2_tp2", 4, checked_run
        ),
        OverrideDefinitions(
            [[*ANY_FOLDER, *EVALUATED, "--dump-folder", "{dir}/one"],
             [*ANY_FOLDER, *EVALUATED, "--dump-folder", "{dir}/eight", "--generator.tensor-parallel-degree", "8", "--generator.sleep", "True"]],
            "FSDP 8 learns as one rank; its engine of TP 8 sleeps during updates", "eight_ranks", [1, 8],
            [same_step(1, "one", "eight", rel=LAYOUT), same_step(2, "one", "eight", rel=LAYOUT)],
            prepare=odd("qwen3", num_attention_heads=8, num_key_value_heads=8, intermediate_size=128, vocab_size=328),
        ),
        OverrideDefinitions(
            [[*KILLED, "--dump-folder", "{dir}/two"], [*KILLED, "--dump-folder", "{dir}/eight", *TP4],
             [*KILLED, "--dump-folder", "{dir}/eight", *TP4, *TP2]],
            "FSDP 8 loses a rank, goes on with FSDP 4 x TP 2 on two nodes of 4, and learns as 2 ranks do", "eight_ranks_killed", [2, 8],
            [same_step(3, "two", "eight", rel=LAYOUT)], exit_codes=[0, 128 + signal.SIGKILL, 0], nodes=[1, 1, 2],
        ),
        *(
            OverrideDefinitions(
                [run("--config", name, *OWN_CONFIG)], f"{name} with two layers, {layout}: samples as transformers", name, 8,
                [steps_are(2), sampler_agrees(), sampled_as_transformers], prepare=published(name),
            )
            for name, layout in {
                "qwen3_0_6b": "8 engines", "qwen3_8b": "engines of TP 2", "qwen3_30b_a3b": "experts on 8 ranks, engines of TP 4",
            }.items()
        ),
    ]  # fmt: skip


def launch(program: str, args: Sequence[str], ngpu: int, log: Path, slots: Sequence[str], nodes: int = 1) -> int:
    """Run one command on `ngpu` ranks that share the slots; its output goes to `log`. Returns the exit code."""
    meeting = two_nodes()[0] if nodes == 2 else [["--standalone"]]
    local, launchers = ngpu // nodes, []
    more = {"OMP_NUM_THREADS": str(max(1, len(slots) // ngpu)), "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "torchtitan_rl.run.launch", f"--nproc_per_node={local}"]
    with log.open("a") as stream:
        for node, options in enumerate(meeting):
            if torch.cuda.is_available():
                more["CUDA_VISIBLE_DEVICES"] = ",".join(slots[node * local :][:local])
            how = {"cwd": ROOT, "stdout": stream, "stderr": subprocess.STDOUT, "env": os.environ | more}
            launchers.append(subprocess.Popen([*command, *options, "-m", program, *args], **how))
        return next(filter(None, [launcher.wait() for launcher in launchers]), 0)


def ranks_of(test: OverrideDefinitions) -> list[int]:
    """How many ranks each run of the test has."""
    given = [test.ngpu] if isinstance(test.ngpu, int) else list(test.ngpu)
    return given + given[-1:] * (len(test.override_args) - len(given))


def run_test(test: OverrideDefinitions, output_dir: Path, slots: Sequence[str]) -> str | None:
    """Run and check one test. Returns what was wrong, or None."""
    folder = output_dir / test.test_name
    data = output_dir / f"{test.test_name}_data"  # a run's folder holds nothing else
    for path in (folder, data):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    if test.prepare:
        test.prepare(data)
    log = output_dir / f"{test.test_name}.log"
    log.unlink(missing_ok=True)
    for i, args in enumerate(test.override_args):
        expected, nodes = (given[min(i, len(given) - 1)] for given in (test.exit_codes, test.nodes))
        args = [arg.replace("{dir}", str(folder)).replace("{data}", str(data)) for arg in args]
        code = launch(test.program, args, ranks_of(test)[i], log, slots, nodes)
        if code != expected:
            end = "\n".join(log.read_text().splitlines()[-30:])
            return f"run {i + 1} exited with {code}, expected {expected}; the end of {log}:\n{end}"
    try:
        for text in test.expect_output:
            assert text in log.read_text(), f"{text!r} is not in {log}"
        for check in (*test.checks, metrics_are_documented):
            check(folder)
    except AssertionError as error:
        return f"{error} (log: {log})"
    return None


class Result(NamedTuple):
    name: str
    ranks: int
    seconds: float
    result: str  # PASS, FAIL or SKIP

    def __str__(self) -> str:
        return f"{self.name:26} {self.ranks:5} {self.seconds:7.0f}  {self.result}"


def run_and_tell(test: OverrideDefinitions, output_dir: Path, slots: Sequence[str]) -> Result:
    """Run one test and print how it went."""
    begin, ranks = time.monotonic(), max(ranks_of(test))
    print(f"RUN  {test.test_name} on {ranks} ranks: {test.test_descr}", flush=True)
    problem = run_test(test, output_dir, slots)
    result = Result(test.test_name, ranks, time.monotonic() - begin, "FAIL" if problem else "PASS")
    print(f"{result.result} {test.test_name} in {result.seconds:.0f} s", *filter(None, [problem]), sep="\n", flush=True)
    return result


def run_all(tests: Sequence[OverrideDefinitions], output_dir: Path) -> list[Result]:
    """Run each test as soon as a slot for each of its ranks is free, one of the GPUs or of the CPU's cores: those of few ranks first,
    side by side. A test with more ranks than the CPU has cores takes all."""
    free: Queue[str] = Queue()
    count = torch.cuda.device_count() or os.cpu_count() or 1
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    for slot in names.split(",")[:count]:
        free.put(slot)

    def run_in(slots: list[str], test: OverrideDefinitions) -> Result:
        try:
            return run_and_tell(test, output_dir, slots)
        finally:
            for slot in slots:
                free.put(slot)

    with ThreadPoolExecutor(count) as pool:
        waiting = sorted(tests, key=lambda test: max(ranks_of(test)))
        running = [
            pool.submit(run_in, sorted(free.get() for _ in range(min(count, max(ranks_of(test))))), test)
            for test in waiting
        ]
    return [each.result() for each in running]


def of_this_commit(tests: Sequence[OverrideDefinitions]) -> list[OverrideDefinitions]:
    """Three of the tests on 8 ranks, others for most commits: these take minutes each on two cores."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout or "0"
    large = [test for test in tests if max(ranks_of(test)) == 8]
    parts = -(-len(large) // 3)
    chosen = large[int(commit, 16) % parts :: parts]
    print(
        f"of {len(large)} tests on 8 ranks, for commit {commit[:8]}: {', '.join(test.test_name for test in chosen)}",
        flush=True,
    )
    return chosen


def parse_args(tests: Sequence[OverrideDefinitions]) -> argparse.Namespace:
    """The command line; an unknown name is an error that lists the known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ngpu = torch.cuda.device_count() or 8
    parser.add_argument("--test_name", default="*", help="one test, or a pattern: 'parity*'")
    parser.add_argument("--quick", action="store_true", help="only the tests of the default test command")
    parser.add_argument("--ngpu", type=int, default=ngpu, help="skip tests that need more ranks")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "tests")
    parser.add_argument("--list", action="store_true", help="print the tests and exit")
    args = parser.parse_args()
    if not any(fnmatch(test.test_name, args.test_name) for test in tests):
        parser.error(f"--test_name {args.test_name}: not one of {', '.join(t.test_name for t in tests)}")
    return args


def main() -> None:
    tests = build_test_list()
    args = parse_args(tests)
    chosen = [test for test in tests if fnmatch(test.test_name, args.test_name)]
    if args.quick:
        also = of_this_commit(tests)
        chosen = [test for test in chosen if test.quick or test in also]
    if args.list:
        print("\n".join(f"{t.test_name:26} {max(ranks_of(t))} ranks  {t.test_descr}" for t in chosen))
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runnable = [test for test in chosen if max(ranks_of(test)) <= args.ngpu]
    results = run_all(runnable, args.output_dir)
    results += [Result(test.test_name, max(ranks_of(test)), 0, "SKIP") for test in chosen if test not in runnable]
    print(f"{'test':26} {'ranks':5} {'seconds':>7}  result", *results, sep="\n")
    counts = Counter(each.result for each in results)
    print(
        f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped (--ngpu is {args.ngpu})",
        flush=True,
    )
    sys.exit(bool(counts["FAIL"]))


if __name__ == "__main__":
    main()
