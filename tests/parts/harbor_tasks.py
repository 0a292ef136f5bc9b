"""Ten tasks in Harbor's form that a sandbox with files alone can run, and others that it cannot."""

from pathlib import Path

from torchtitan_rl.configs.toys.word_tasks import check, write_task

PYTHON = "FROM python:3.12-slim\nWORKDIR /app\n"
TEN = {
    "word": ("Write hello into out.txt.", check("grep -qx hello out.txt"), "echo hello > out.txt", {}),
    "sorted": (
        "Sort /app/names into /app/sorted.",
        check("cmp -s /app/sorted <(sort /app/names)"),
        "sort names > sorted",
        {
            "environment/Dockerfile": "FROM debian:12-slim AS base\n# names\nWORKDIR /app\nCOPY names \\\n  ./\n",
            "environment/names": "b\nc\na\n",
        },
    ),
    "folder": (
        "Count the lines of all files in /data/parts into /data/count.",
        check('[ "$(cat /data/count)" = 3 ]'),
        "cat /data/parts/* | wc -l > /data/count",
        {
            "environment/Dockerfile": "FROM ubuntu:24.04\nCOPY parts /data/parts\n",
            "environment/parts/a": "1\n2\n",
            "environment/parts/b": "3\n",
        },
    ),
    "variable": (
        "Write the value of SECRET into /root/secret.",
        check('grep -qx "$EXPECTED" /root/secret'),
        'echo "$SECRET$MORE" > /root/secret',
        {
            "environment/Dockerfile": "FROM debian\nENV BASE=/opt/x SECRET=four\nENV SECRET=${SECRET}ty\nWORKDIR $BASE\n",
            "task.toml": '[solution]\nenv = {MORE = "-${UNSET:-two}"}\n[verifier]\ntimeout_sec = 30.0\nenv = {EXPECTED = "fourty-two"}\n',
        },
    ),
    "fixed": (
        "total.py prints a wrong sum of 1 to 10. Correct it.",
        "total=$(python3 total.py)\npython3 -c \"import json; print(json.dumps({'reward': int($total == 55), 'time': 0.5}))\" > /logs/verifier/reward.json",
        "sed -i 's/range(10)/range(11)/' total.py",
        {"environment/Dockerfile": PYTHON + "COPY . .\n", "environment/total.py": "print(sum(range(10)))\n"},
    ),
    "made": (
        "Append the line end to the file that is there.",
        check('[ "$(tail -n 1 /srv/log/app.log)" = end ]'),
        "echo end >> app.log",
        {
            "environment/Dockerfile": 'FROM debian\nWORKDIR /srv\nRUN mkdir log && \\\n    echo begin > log/app.log\nWORKDIR log\nCMD ["bash"]\n'
        },
    ),
    "server": (
        "Serve the file page at port 8000.",
        check("curl -s http://localhost:8000/page | grep -qx hi"),
        "python3 -m http.server 8000 --bind 127.0.0.1 > /dev/null 2>&1 &\nsleep 1",
        {"environment/Dockerfile": PYTHON + "COPY page .\n", "environment/page": "hi\n"},
    ),
    "half": (
        "Make either a or b, or both.",
        "echo \"scale=2; $(ls a b 2> /dev/null | wc -l) / 2\" | sed 's/.*; 2.*/1./; s/.*; 1.*/.5/; s/.*; 0.*/0/' > /logs/verifier/reward.txt; exit 3",
        "touch a b",
        {},
    ),
    "image": (
        "Write the number of words of text into count.",
        check('[ "$(cat /work/count)" = 4 ]'),
        "wc -w < text > count",
        {
            "task.toml": '[environment]\ndocker_image = "debian:12"\nworkdir = "/work"\nmemory = "1G"\n',
            "environment/Dockerfile": None,
            "environment/text": "a b c d\n",
        },
    ),
    "canary": (
        "<!-- canary GUID 1 -->\n# canary 2\n\nMake the folder /app/new.",
        check("[ -d /app/new ]"),
        "mkdir /app/new",
        {
            "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 20.0\n[environment]\ncpus = 1\nstorage = "100M"\n'
        },
    ),
}
"""{name: (instruction, tests, solution, other files)}"""
LEFT_OUT = {
    "apt": (
        {"environment/Dockerfile": "FROM debian\nRUN apt-get update\n"},
        "whose Dockerfile needs a network (apt-get)",
    ),
    "rust": ({"environment/Dockerfile": "FROM rust:1\n"}, "with the image rust:1"),
    "stages": (
        {"environment/Dockerfile": "FROM debian\nCOPY --from=a /b /b\n"},
        "with 'COPY --from=a /b /b' in the Dockerfile",
    ),
    "user": ({"environment/Dockerfile": "FROM debian\nUSER me\n"}, "with 'USER me' in the Dockerfile"),
    "variable of the old form": (
        {"environment/Dockerfile": "FROM debian\nENV A b\n"},
        "with 'ENV A b' in the Dockerfile",
    ),
    "compose": ({"environment/docker-compose.yaml": ""}, "with environment/docker-compose.yaml"),
    "tools": ({"task.toml": '[[environment.mcp_servers]]\nname = "x"\n'}, "with environment.mcp_servers in task.toml"),
    "uvx": ({"tests/test.sh": "# no pip install\nuvx pytest\n"}, "whose tests/test.sh needs a network (uvx)"),
    "broken": ({"task.toml": "["}, "whose task.toml cannot be read"),
    "usr": (
        {"environment/Dockerfile": "FROM debian\nCOPY . /usr/x\n"},
        "whose Dockerfile failed (mkdir: cannot create directory",
    ),
    "size": (
        {"task.toml": '[environment]\nmemory = "2GiB"\n'},
        "with environment.memory = '2GiB' in task.toml",
    ),
    "old": ({"task.yaml": "instruction: x\n"}, "without task.toml"),
}
"""{name: (files, the beginning of the reason)}"""


def write_ten(folder: Path) -> None:
    """Writes the ten tasks."""
    for name, (instruction, tests, solution, files) in TEN.items():
        write_task(folder / name, instruction, tests, solution, **files)


def write_left_out(folder: Path) -> None:
    """Writes the tasks that are left out."""
    for name, (files, _) in LEFT_OUT.items():
        write_task(folder / name, f"Do {name}.", "true", "true", **files)
    (folder / "old/task.toml").unlink()
