"""In which order the engine sleeps, wakes and is filled: an engine that records calls, since a CPU's cannot sleep."""

import pytest
import torch

from torchtitan_rl.generator.generator import Generator
from torchtitan_rl.sync import in_process
from torchtitan_rl.sync.in_process import InProcess


class RecordingEngine:
    """What `Generator` asks of vLLM's LLM, in order; `kept_cache` makes it keep its prefix cache."""

    def __init__(self, *, kept_cache=False):
        self.calls = []
        self.kept_cache = kept_cache

    def sleep(self, *, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, *, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method, *, kwargs):
        for name, _ in kwargs["weights_iterator"]:
            self.calls.append(f"{method} {name}")

    def apply_model(self, function):
        self.calls.append("apply_model")
        return [function(None)]

    def reset_prefix_cache(self):
        self.calls.append("reset prefix cache")
        return not self.kept_cache


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(in_process, "num_cached_blocks", lambda llm: 0)
    monkeypatch.setattr(in_process, "ON_CPU", False)


def generator(*, sleeps=True, engine=None):
    made = object.__new__(Generator)
    made.llm = engine or RecordingEngine()
    made._sleeps, made.asleep, made.policy_version, made.lora_request = sleeps, False, -1, None
    made.wide_head = None
    return made


def push(made, *base, version=0, adapter=()):
    """Send the weights of these names; without a name the engine keeps its base, and without an adapter it has none."""
    engine = object.__new__(InProcess)
    engine._generator, engine._lora, engine._model, engine._placed = made, bool(adapter), None, False
    engine.send(weights(made, *base) if base else None, weights(made, *adapter), policy_version=version)


def weights(made, *names):
    """The iterator that the trainer gathers lazily: each weight is made when the engine is ready for it."""
    for name in names:
        made.llm.calls.append(f"gather {name}")
        yield {name: torch.zeros(1)}


def test_engine_sleeps_for_training_and_wakes_in_order():
    made = generator()
    made.sleep()
    made.sleep()  # does nothing
    made.llm.calls.append("train")
    push(made, "a", "b", version=3)
    filled = ["gather a", "reload_weights a", "gather b", "reload_weights b"]
    assert made.llm.calls == ["sleep 2", "train", "wake weights", *filled, "wake kv_cache", "reset prefix cache"]
    assert made.policy_version == 3


def test_with_lora_the_base_is_loaded_once_and_kept_on_the_host(monkeypatch):
    made = generator()
    made.lora_request = "request"
    monkeypatch.setattr(in_process, "replace_adapter", lambda model, tensors, lora: made.llm.calls.append("replace"))
    made.sleep()
    push(made, "base", adapter=["q.lora_A.weight"])
    made.sleep()
    push(made, adapter=["q.lora_A.weight"])
    base = ["gather base", "reload_weights base"]
    then = ["gather q.lora_A.weight", "replace", "wake kv_cache", "reset prefix cache"]
    assert made.llm.calls == ["sleep 1", "wake weights", *base, *then, "sleep 1", "wake weights", *then]


def test_proof_wakes_a_sleeping_engine_before_reading_its_buffers():
    made = generator()
    made.config = Generator.Config()
    made.sleep()
    made.inspect(lambda model: None)
    push(made)
    assert made.llm.calls[:3] == ["sleep 2", "wake weights", "apply_model"]
    assert made.llm.calls[-2:] == ["wake kv_cache", "reset prefix cache"]


def test_failed_prefix_cache_reset_is_an_error():
    with pytest.raises(RuntimeError, match="prefix cache"):
        push(generator(engine=RecordingEngine(kept_cache=True)))
