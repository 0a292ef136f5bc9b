import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The Python blocks of the module's PAGE, each in the file that its first line names. MODULES are imported anew."""
    page = request.module.PAGE.read_text()
    for name, code in re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in request.module.MODULES:
        sys.modules.pop(name, None)
