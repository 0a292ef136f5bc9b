"""How much memory there is for the processes here."""

from torchtitan_rl.run import out_of_memory


def test_usable_memory_is_the_containers_limit_if_it_has_one(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(out_of_memory, "CONTAINER_LIMITS", (tmp_path / "none", tmp_path / "memory.max"))
    assert out_of_memory.usable_bytes() > 2**30
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert out_of_memory.usable_bytes() == 2**30
