"""Serves a run's policy, or the model of a folder, with vLLM's own server for OpenAI's and Anthropic's clients."""

import json
import os
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_rl import device  # before vLLM

# isort: split
from vllm.entrypoints.launchers.api_server.entry import main

from torchtitan_rl.command.export import exported
from torchtitan_rl.data.end_tokens import end_token_ids
from torchtitan_rl.generator.grammars import call_form
from torchtitan_rl.run.start_checkpoint import load_tokenizer

MODEL = "policy"
"""The model's name, as agents have it in training."""

_OF_PROMPTS = ("system_prompt", "few_shot")
"""Fields of a run's prompts which a server does not add to a request."""


def serve(folder: Path, step: int | None, host: str, port: int, options: Sequence[str]) -> None:
    """Serves a run or a model's folder until Ctrl-C, and prints the address once it answers.

    `options`: further ones of vLLM's server. Raises UserError as `exported`.
    """
    for name, value in (("PYTHONWARNINGS", "ignore"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)  # for the engine's process
    stored = json.loads((folder / "config.json").read_text())
    with exported(folder, step) as model, tempfile.TemporaryDirectory() as scratch:
        address = ["--served-model-name", MODEL, "--host", host, "--port", str(port)]
        own = _options(stored, model, Path(scratch))
        sys.argv = ["torchtitan-rl serve", *address, *own, *options]
        about = _about(
            stored.get("prompts", {}),
            f"http://{'localhost' if host == '0.0.0.0' else host}:{port}",
            is_chat=bool(load_tokenizer(str(model)).chat_template),
        )
        ready = threading.Thread(target=_tell_when_ready, args=(host, port, about), daemon=True)
        ready.start()
        main()
    os._exit(0)  # vLLM's libraries complain at the end of an interpreter


def _options(stored: Mapping[str, Any], model: Path, scratch: Path) -> list[str]:
    """Returns the options of vLLM's server by which a model answers as in the run whose config is `stored`.

    Those are the sampling of its evaluations, its end tokens, and how its tool calls are read. Writes into `scratch`.
    """
    tokenizer, prompts = load_tokenizer(str(model)), stored.get("prompts", {})
    sampling = stored.get("evaluation", {}).get("sampling", {})
    names = ("temperature", "top_p", "top_k", "min_p")
    defaults = {name: sampling[name] for name in names if name in sampling}
    own = model / "generation_config.json"
    generation = json.loads(own.read_text()) if own.is_file() else {}
    ends = {*end_token_ids(model, tokenizer), *sampling.get("stop_token_ids", ())}
    generation["eos_token_id"] = sorted(ends)
    (scratch / own.name).write_text(json.dumps(generation))
    parser = stored.get("conversations", {}).get("tool_call_parser", "auto")
    if parser == "auto":
        template = str(tokenizer.chat_template)
        is_llama = call_form("auto", template) == call_form("llama3_json", template)
        parser = "llama3_json" if is_llama else "hermes"
    options = ["--model", str(model), "--max-model-len", "auto"]
    options += ["--generation-config", str(scratch)]
    options += ["--override-generation-config", json.dumps(defaults)]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    options += ["--uvicorn-log-level", "warning", "--no-use-tqdm-on-load"]
    if "enable_thinking" in prompts:
        thinking = {"enable_thinking": prompts["enable_thinking"]}
        options += ["--default-chat-template-kwargs", json.dumps(thinking)]
    if device.ON_CPU:
        options += ["--dtype", "float32", "--enforce-eager"]
        options += ["--distributed-executor-backend", "uni"]
    return options


def _tell_when_ready(host: str, port: int, about: str) -> None:
    while True:
        with suppress(OSError), socket.create_connection((host, port)):
            print(about, flush=True)
            return
        time.sleep(0.2)


def _about(prompts: Mapping[str, Any], address: str, *, is_chat: bool) -> str:
    """Returns how to ask the server: a request, the variables of clients, and what the run's prompts have."""
    question = "What is 12 + 30?"
    path, body = "completions", {"prompt": f"{question}\n", "max_tokens": 32}
    if is_chat:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": question}]}
    to_bring = [f"{name} {prompts[name]!r}" for name in _OF_PROMPTS if prompts.get(name)]
    return f"""{address} answers as the model "{MODEL}". Ctrl-C ends it.
curl {address}/v1/{path} -H "Content-Type: application/json" -d {shlex.quote(json.dumps(body))}
export OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY=none
export ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY=none ANTHROPIC_MODEL={MODEL}
""" + "".join(f"A request must bring the run's prompts.{part}\n" for part in to_bring)
