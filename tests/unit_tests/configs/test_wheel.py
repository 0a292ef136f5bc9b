"""The folder configs/ in an installed wheel: torchtitan_rl.configs, beside a user's own package configs."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIST = """
from torchtitan_rl.command.registry import config_functions, load_config
import configs, torchtitan_rl

assert configs.MINE
assert torchtitan_rl.__file__.startswith({wheel!r})
print(load_config("debug").task.build().train_example(0, seed=0).text)
print(load_config("debug_calculator").task.warm_start, *config_functions())
"""


def test_wheel_has_the_registry_under_our_name_and_a_users_configs_stays_importable(tmp_path):
    source, mine, wheel = tmp_path / "source", tmp_path / "mine", tmp_path / "wheel"
    for folder in ("configs", "torchtitan_rl"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / file, source)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(source.glob("*.whl"))) as packed:
        packed.extractall(wheel)
    assert {file.name for file in wheel.iterdir()} == {"torchtitan_rl", "torchtitan_rl-0.1.0.dist-info"}
    (mine / "configs").mkdir(parents=True)
    (mine / "configs" / "__init__.py").write_text("MINE = True\n")
    command = [sys.executable, "-c", LIST.format(wheel=str(wheel))]
    ended = subprocess.run(
        command, cwd=mine, env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "What is" in ended.stdout
    assert "torchtitan_rl.configs.toys.conversation_recipes:calculator" in ended.stdout
    assert {"debug", "debug_rows", "smollm2", "qwen3_8b"} <= {*ended.stdout.split()}
