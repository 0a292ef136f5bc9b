import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the Python blocks of the module's PAGE, each in the file that its first line names, to be imported anew."""
    blocks = re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", request.module.PAGE, re.DOTALL)
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, _ in blocks:
        sys.modules.pop(name.removesuffix(".py"), None)
