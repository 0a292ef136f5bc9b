"""Compares the policy of a small model with transformers' own on one sequence, on the CPU, before anything is trained.

The weight sync proves that the engine holds the policy's weights, and every step compares their log-probabilities. Neither notices
what policy and engine compute wrongly together. transformers reads the folder on its own: its config.json, its weights.
"""

import gc
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchtitan_rl.build.start_checkpoint import START_CHECKPOINTS
from torchtitan_rl.errors import expect
from torchtitan_rl.models.hf_decoder import HFDecoder, longest_window
from torchtitan_rl.models.score import score
from torchtitan_rl.run.out_of_memory import usable_bytes
from torchtitan_rl.trainer.model_loader import load_hf_weights, meta_model
from torchtitan_rl.types import SegmentLayout

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.model_spec import ModelSpec

    from torchtitan_rl.config import RunConfig

LIMIT = 0.01
"""Largest difference in log-probability that is rounding, in nats. Both compute in float32 and agree to about 1e-5."""

PARAMETERS = 7 * 10**8
"""Largest model that is compared. It is loaded twice, one after the other, with 4 bytes a parameter."""

MEMORY_SHARE = 4
"""The model in float32 may take this fraction of the machine's memory: 1 / MEMORY_SHARE."""

SECONDS = 30
"""transformers' half is skipped if the policy's half takes more than half of this."""

TOKENS, MOST_TOKENS = 32, 512
"""Length of the sequence; with sliding windows, so long that the largest one is full, but at most MOST_TOKENS."""


def compare_start(config: "RunConfig") -> str:
    """Returns a line for the user: how far policy and transformers differ, or why they were not compared.

    Returns "" on ranks other than 0, and for a start that the task made with transformers' own model.

    Raises:
        UserError: naming `hf_assets_path`, if they differ by more than LIMIT.
    """
    folder, spec = Path(config.hf_assets_path), config.model_spec
    needless = os.environ.get("RANK", "0") != "0" or folder.parent == START_CHECKPOINTS
    return "" if needless else _compare(folder, spec)


def logprobs_at_start(config: "RunConfig", ids: Tensor) -> Tensor | None:
    """Returns the start's log π(ids[1:]), [L - 1], at the run's temperature; None for a model too large to be compared."""
    policy = meta_model(config.model_spec, seq_len=len(ids))
    if _num_parameters(policy) > _most_parameters():
        return None
    return _policy_logprobs(
        policy,
        config.model_spec,
        Path(config.hf_assets_path),
        ids,
        temperature=config.sampling.temperature,
    )


def _num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _most_parameters() -> int:
    return min(PARAMETERS, usable_bytes() // (4 * MEMORY_SHARE))


def _compare(folder: Path, spec: "ModelSpec") -> str:
    began, random = time.monotonic(), torch.Generator().manual_seed(0)
    model, bounds = spec.model, "(docs/models.md#compared-with-transformers)"
    length = min(max(TOKENS, longest_window(model) + 16), MOST_TOKENS, model.max_seq_len)
    ids = torch.randint(0, model.vocab_size, (length,), generator=random)  # [L]
    policy = meta_model(spec, seq_len=length)
    parameters = _num_parameters(policy)
    if parameters > _most_parameters():
        return f"not compared with transformers: its {parameters:,} parameters are too many here {bounds}"
    ours = _policy_logprobs(policy, spec, folder, ids)
    del policy
    gc.collect()
    if time.monotonic() - began > SECONDS / 2:
        return f"not compared with transformers: it would take over {SECONDS} s here {bounds}"
    try:
        theirs = _transformers_logprobs(folder, ids, getattr(model, "part_of", ""))
    except Exception as error:  # whatever a model's code or its loading raises
        return f"not compared with transformers, which raises {type(error).__name__}: {error}"
    if not ours.isfinite().all():
        expected = "weights with which log-probabilities are numbers, but they are NaN or infinite"
        remedy = f"{_not_finite(folder)} Download it again."
        expect(False, "hf_assets_path", str(folder), expected, remedy)
    largest = float((ours - theirs).abs().max())
    expect(
        largest <= LIMIT, "hf_assets_path", str(folder),
        f"a model whose log-probabilities are those of transformers, but for a sequence of {length} tokens they differ by {largest:.2g}, "
        f"and rounding is at most {LIMIT}",
        f"Compare config.json with the model's page: an entry of it is wrong, or is not implemented here {bounds}.",
    )  # fmt: skip
    return (
        f"the policy's log-probabilities of {length - 1} random tokens are those of transformers to {largest:.1e} "
        f"({time.monotonic() - began:.1f} s)"
    )


@torch.no_grad()
def _policy_logprobs(
    model: "Decoder", spec: "ModelSpec", folder: Path, ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Returns the policy's log π(ids[1:]), [L - 1], with the weights that training would load."""
    load_start(model, spec, folder)
    layout = SegmentLayout.of([len(ids)], device="cpu")
    logprobs = score(model, ids, ids.roll(-1), layout, temperature).logprobs  # [L]
    return logprobs[:-1]


def load_start(model: "Decoder", spec: "ModelSpec", folder: Path) -> None:
    """Give a model of `meta_model` memory on the CPU and the folder's weights."""
    model.init_weights(
        buffer_device=torch.device("cpu")
    )  # parameters have no memory yet, so no time goes into random ones
    _make_parameters(model)
    if isinstance(spec.model, HFDecoder.Config):
        model.init_weights(buffer_device=None)  # computes buffers alone, where the parameters are
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        load_hf_weights(model, spec.state_dict_adapter(spec.model, None), str(folder))


def _make_parameters(model: nn.Module) -> None:
    """Give a model's parameters memory on the CPU, and tied ones the same; and buffers that have none yet."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))


@torch.no_grad()
def _not_finite(folder: Path) -> str:
    """A sentence with the first tensor of the folder that has NaN or infinity, or that none has."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it has no iterator
                if not opened.get_tensor(name).isfinite().all():
                    return f"{name} in {file.name} has such values."
    return "No tensor has such values: they overflow in between."


def _transformers_logprobs(folder: Path, ids: Tensor, part_of: str) -> Tensor:
    """Returns transformers' log π(ids[1:]), [L - 1], with its eager attention: of the whole model, if the text is part of one."""
    import transformers

    with _quiet():
        model = getattr(transformers, part_of or "AutoModelForCausalLM").from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
        )
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)  # [L - 1, V]
    return logprobs.gather(-1, ids[1:, None])[:, 0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn transformers' progress bars and its table of loaded tensors off: weight_files.py has looked at them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
