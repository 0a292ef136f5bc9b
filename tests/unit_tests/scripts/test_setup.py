"""scripts/setup.sh with a stand-in for Python, and scripts/uv.py: the choice of kind and installer, the lock, what is said of failures."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PYTHON = """
echo "$*" >>"$CALLS"
case "$*" in
  "-m venv "*) mkdir -p .venv/bin .venv/lib/python3.11/site-packages && cp "$0" .venv/bin/python ;;
  "-m pip "*"install --quiet uv=="*) exit "${UV_CODE:-0}" ;;
  *"check_build_tools()") echo "errors.UserError: no C compiler" >&2; exit "${TOOLS_CODE:-0}" ;;
  *"check_engine_library()") echo "errors.UserError: no libnuma" >&2; exit "${LIBRARY_CODE:-0}" ;;
  *--dry-run*) echo "Would install torch-2.13.0${TORCH_BUILD:-}" ;;
  *" -r "*) echo "${INSTALL_SAYS:-}"; exit "${INSTALL_CODE:-0}" ;;
esac
"""
"""Notes its arguments; makes a .venv with itself in it; fails and prints as the test's variables say."""


@pytest.fixture
def checkout(tmp_path):
    """Runs setup.sh in a copy of the checkout's set-up files; `calls()` are the lines of arguments that Python got."""
    for path in ("scripts/setup.sh", "pyproject.toml", "requirements/cpu.lock", "requirements/gpu.lock"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program(bin_folder / "python3", PYTHON)
    program(bin_folder / "nvidia-smi", "exit ${NO_GPU:-9}")
    calls = tmp_path / "calls.txt"

    def run(*args, **variables):
        calls.write_text("")
        path = f"{bin_folder}:{os.environ['PATH']}"
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHTITAN_RL_", "UV_"))}
        environment = own | {"PATH": path, "CALLS": str(calls), "PYTHON": "python3"} | variables
        command = ["bash", str(tmp_path / "scripts/setup.sh"), *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    run.calls = lambda: calls.read_text()
    return run


def program(file, text):
    file.write_text("#!/usr/bin/env bash\n" + text)
    file.chmod(0o755)


def test_uv_installs_the_locked_versions_and_the_second_call_does_nothing(checkout):
    assert checkout("--check").returncode == 1
    assert checkout().returncode == 0
    locked = "scripts/uv.py pip install --python .venv/bin/python --no-deps -r requirements/cpu.lock -e ."
    assert locked in checkout.calls()
    assert checkout("--check").returncode == 0
    assert checkout.calls() == ""


@pytest.mark.parametrize("variable", ["", "1"])
def test_where_python_writes_no_bytecode_this_environment_keeps_its_own(checkout, tmp_path, variable):
    assert checkout(PYTHONDONTWRITEBYTECODE=variable).returncode == 0
    packages = tmp_path / ".venv/lib/python3.11/site-packages"
    code = f"import site, sys; site.addsitedir({str(packages)!r}); print(sys.dont_write_bytecode, sys.pycache_prefix, sys.prefix)"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": variable}
    started = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    no_bytecode, kept_in, prefix = started.stdout.split()
    assert no_bytecode == "False"
    assert kept_in == (f"{prefix}/bytecode" if variable else "None")


def test_pip_installs_the_same_where_it_is_asked_for_or_uv_cannot_be_installed(checkout):
    assert checkout(TORCHTITAN_RL_INSTALLER="pip").returncode == 0
    assert "uv" not in checkout.calls()
    locked = "-m pip --disable-pip-version-check install --progress-bar off --no-deps -r requirements/cpu.lock -e ."
    assert locked in checkout.calls()
    shutil.rmtree(Path(checkout("--check").args[1]).parents[1] / ".venv")
    result = checkout(UV_CODE="1")
    assert result.returncode == 0
    assert "going on with pip" in result.stdout
    assert locked in checkout.calls()


@pytest.mark.parametrize(("build", "from_its_index"), [("+cpu", False), ("", True)])
def test_torch_comes_from_its_cpu_index_where_the_plain_name_is_the_cuda_build(checkout, build, from_its_index):
    checkout(TORCH_BUILD=build)
    installed = [
        line for line in checkout.calls().splitlines() if line.endswith("torch==2.13.0") and "--dry-run" not in line
    ]
    assert len(installed) == 1
    assert ("--default-index https://" in installed[0]) is from_its_index


@pytest.mark.parametrize(
    ("machine", "lacks"),
    [({"NO_GPU": "0", "TOOLS_CODE": "1"}, "C compiler"), ({"LIBRARY_CODE": "1"}, "libnuma")],
    ids=["a GPU's", "a CPU's"],
)
def test_a_machine_that_lacks_a_tool_is_refused_before_anything_is_installed(checkout, machine, lacks):
    result = checkout(**machine)
    assert result.returncode == 1
    assert result.stderr == f"setup: error: no {lacks}\n"
    assert "-m venv" not in checkout.calls()


def test_without_a_compiler_only_the_package_that_must_be_compiled_is_left_out(checkout):
    result = checkout(TOOLS_CODE="1")
    assert result.returncode == 0
    assert "without pycosat, and so without the tasks of reasoning-gym" in result.stdout
    whole = (ROOT / "requirements/cpu.lock").read_text().splitlines()
    installed = Path(result.args[1]).parents[1] / ".venv/without-compiler.lock"
    assert [line for line in whole if line not in installed.read_text().splitlines()] == ["pycosat==0.6.6"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_lock_has_exact_versions_and_no_address(kind):
    lines = (ROOT / f"requirements/{kind}.lock").read_text().splitlines()
    requirements = [line for line in lines if not line.startswith("#")]
    assert [line for line in requirements if not re.match(r"[\w.-]+==[\w.+!]+( ; .+)?$", line)] == []
    assert "torch==2.13.0" in requirements
    assert "://" not in "".join(lines)
    left_out = {"torchvision", "torchaudio", "torchcodec"} & {line.partition("==")[0] for line in requirements}
    assert bool(left_out) is (kind == "gpu")


def test_uv_is_told_what_pip_is_configured_with():
    spec = importlib.util.spec_from_file_location("uv_script", ROOT / "scripts/uv.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    listed = r"""global.index-url='https://user:word@mirror/simple'
global.find-links='/old'
global.extra-index-url='https://one/simple\nhttps://two/simple'
install.trusted-host='mirror'
:env:.find-links='/wheels /more'
:env:.disable-pip-version-check='1'"""
    assert script.variables(listed) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://user:word@mirror/simple",
        "UV_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "mirror",
    }
