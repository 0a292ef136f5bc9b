"""`HostAdamW` against torch's AdamW: the same run bit by bit, across a resume, and in whatever order a GPU's streams run."""

from contextlib import contextmanager
from itertools import permutations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.parts.tiny import save_tiny_checkpoint
from tests.parts.tiny_trainer import credited, tiny_trainer, weights
from torchtitan_rl.models.lora.lora_config import LoraConfig
from torchtitan_rl.run.checkpointer import policy_state
from torchtitan_rl.trainer import host_adamw
from torchtitan_rl.trainer.host_adamw import HostAdamW
from torchtitan_rl.trainer.optimizer import AdamW
from torchtitan_rl.trainer.trainer_config import LRSchedule


def state_of(trainer):
    return {"optimizer": trainer.optimizer, **policy_state(trainer.model)}


@pytest.mark.parametrize("rank", [0, 4])
def test_the_run_is_the_same_and_goes_on_with_the_other_setting(one_rank, tmp_path, monkeypatch, rank):
    monkeypatch.setattr(host_adamw, "BUCKET_BYTES", 4096)  # some tensors are a bucket, some share one
    save_tiny_checkpoint(tmp_path / "start")

    def build(on_host):
        torch.manual_seed(0)  # LoRA's A
        optimizer = AdamW.Config(lr=1e-2, weight_decay=0.1, on_host=on_host)
        lora, schedule = LoraConfig(rank=rank), LRSchedule(warmup_steps=0)
        return tiny_trainer(str(tmp_path / "start"), optimizer=optimizer, lora=lora, lr_scheduler=schedule)

    runs = {on_host: build(on_host) for on_host in (True, False)}
    start = weights(runs[True])
    for _ in range(2):
        for trainer in runs.values():
            trainer.update(credited(trainer))
    assert torch.equal(weights(runs[True]), weights(runs[False]))
    assert not torch.equal(weights(runs[True]), start)
    for on_host, trainer in runs.items():
        dcp.save(state_of(trainer), checkpoint_id=tmp_path / f"{on_host}")
        other = build(not on_host)
        dcp.load(state_of(other), checkpoint_id=tmp_path / f"{on_host}")
        other.after_load()
        for one in (trainer, other):
            one.update(credited(one))
        assert torch.equal(weights(trainer), weights(other))


class Streams:
    """Stands for torch.cuda: an operator runs when its stream gets there, and streams only wait for what they are told to."""

    class Stream(list):
        """What has yet to run: calls, and (stream, how many of its entries must have run)."""

        done = 0

        def wait_stream(self, other):
            self.append((other, other.done + len(other)))

    def __init__(self, order):
        self.order, self.computing = order, self.Stream()
        self.at = self.computing

    def current_stream(self):
        return self.at

    @contextmanager
    def stream(self, stream):
        before, self.at = self.at, stream
        yield
        self.at = before

    def synchronize(self):
        while left := [stream for stream in self.order if stream]:
            stream = next(s for s in left if not isinstance(s[0], tuple) or s[0][0].done >= s[0][1])
            first = stream.pop(0)
            stream.done += 1
            if not isinstance(first, tuple):
                first()


@pytest.mark.parametrize("order", permutations(range(3)))
def test_streams_wait_for_what_they_need_in_any_order(monkeypatch, order):
    """Two steps at once on streams of which the first in `order` always runs as far as it may."""
    monkeypatch.setattr(host_adamw, "BUCKET_BYTES", 160)
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(size)) for size in (10, 3, 40, 5, 5)] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1, "fused": True}
    one, other = HostAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    one._device = streams = Streams([])
    one._inward, one._outward = streams.Stream(), streams.Stream()
    streams.order = [(streams.computing, one._inward, one._outward)[place] for place in order]
    compute, copy = host_adamw.adamw, torch.Tensor.copy_
    monkeypatch.setattr(
        host_adamw, "adamw", lambda *args, **kwargs: streams.at.append(lambda: compute(*args, **kwargs))
    )
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of, non_blocking: streams.at.append(lambda: copy(to, of)))
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.clone()
        one.step()
        other.step()
    state, expected = one.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert all(torch.equal(t, expected[i][name]) for i in state for name, t in state[i].items())
