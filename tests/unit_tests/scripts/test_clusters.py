"""examples/clusters: the files have the systems' published form, and their commands start the run that they should."""

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from torchtitan_rl.command.registry import parse_args

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "clusters"
SCHEMAS = json.loads((ROOT / "tests" / "parts" / "cluster_schemas.json").read_text())
KINDS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}


def documents(name: str) -> dict[str, dict]:
    """The documents of a Kubernetes file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def kubernetes_faults(document: dict) -> list[str]:
    schema = {"$ref": f"#/$defs/{KINDS[document['kind']]}", **SCHEMAS["kubernetes"]}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("name", ["trainjob.yaml", "jobset.yaml"])
def test_kubernetes_files_have_the_published_form(name):
    assert {kind: kubernetes_faults(one) for kind, one in documents(name).items()} == dict.fromkeys(documents(name), [])


def test_skypilot_file_has_the_published_form():
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    jsonschema.validate(task, SCHEMAS["skypilot"]["task"])
    jsonschema.validate(task["resources"], SCHEMAS["skypilot"]["resources"])


def command_of(name: str) -> tuple[list[str], dict[str, str]]:
    """The command of a file's second node, with the variables that its system sets there."""
    if name == "jobset.yaml":
        [job] = documents(name)["JobSet"]["spec"]["replicatedJobs"]
        [container] = job["template"]["spec"]["template"]["spec"]["containers"]
        variables = {one["name"]: one["value"] for one in container["env"]}
        return container["command"] + container["args"], {**variables, "JOB_COMPLETION_INDEX": "1"}
    if name == "trainjob.yaml":
        trainer = documents(name)["TrainJob"]["spec"]["trainer"]
        variables = {one["name"]: one["value"] for one in trainer["env"]}
        pet = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "grpo-node-0-0.grpo", "MASTER_PORT": "29500"}
        return trainer["command"] + trainer["args"], {**variables, **{f"PET_{k}": v for k, v in pet.items()}}
    task = yaml.safe_load((FOLDER / name).read_text())
    sky = {"NUM_NODES": "2", "NODE_RANK": "1", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    return ["bash", "-c", task["run"]], {**task["envs"], **{f"SKYPILOT_{k}": v for k, v in sky.items()}}


@pytest.mark.parametrize("name", ["trainjob.yaml", "jobset.yaml", "skypilot.yaml"])
def test_command_of_a_node_starts_its_part_of_the_run_and_becomes_it(tmp_path, name):
    """The stand-in says its process id: it must be that of the command, which gets the signals."""
    stand_in = tmp_path / "run_train.sh"
    stand_in.write_text(
        '#!/usr/bin/env bash\necho $$ "$NNODES $NODE_RANK $MASTER_ADDR ${MASTER_PORT:-29500}"\nprintf "%s\\n" "$@"\n'
    )
    stand_in.chmod(0o755)
    command, variables = command_of(name)
    path = {"PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(command, cwd=tmp_path, env={**path, **variables}, stdout=subprocess.PIPE, text=True)
    first, *arguments = process.communicate(timeout=20)[0].splitlines()
    pid, *node = first.split()
    assert int(pid) == process.pid
    address = "10.0.0.1" if name == "skypilot.yaml" else "grpo-node-0-0.grpo"
    assert node == ["2", "1", address, "29500"]
    assert variables["TORCHTITAN_RL_KIND"] == "gpu"
    config_name, config = parse_args(arguments)
    assert (config_name, config.dump_folder) == ("qwen3_8b", "/shared/runs/grpo")
