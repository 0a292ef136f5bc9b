"""Secrets in the environment of a process are kept there and not shown to others."""

import os
import subprocess
import sys

PROGRAM = """
import os, subprocess, sys
from torchtitan_rl.common.secret_variables import hide_from_proc
shown = lambda: open("/proc/self/environ").read()
assert "hunter-12345" in shown() and "hunter-67890" in shown()
hide_from_proc()
hide_from_proc()
assert "hunter" not in shown(), shown()
assert "PLAIN=as-it-was" in shown()
assert os.environ["JUDGE_KEY"] == "hunter-12345"
child = subprocess.run(["printenv", "JUDGE_KEY", "DATABASE_URL"], capture_output=True, text=True).stdout.split()
assert child == ["hunter-12345", "postgres://me:hunter-67890@db/rows"]
"""


def test_secrets_are_hidden_from_proc_but_available_to_the_process_and_its_children():
    secrets = {"JUDGE_KEY": "hunter-12345", "DATABASE_URL": "postgres://me:hunter-67890@db/rows", "PLAIN": "as-it-was"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **secrets}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
