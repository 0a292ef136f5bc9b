"""What a job is started with, whoever starts it."""

import subprocess
import sys


def test_closed_standard_streams_are_opened_for_all_that_is_started():
    code = "from torchtitan_rl.launch import open_streams; open_streams(); import subprocess, sys; "
    code += "sys.exit(subprocess.run([sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']).returncode)"
    closed = ["sh", "-c", f'{sys.executable} -c "$0" <&- >&- 2>&-', code]
    assert subprocess.run(closed).returncode == 0
