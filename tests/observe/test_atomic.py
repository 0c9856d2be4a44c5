import errno

import pytest

from moe_jax.errors import UserError
from moe_jax.observe.run_folder import atomic_file, disk_errors_named, write_atomically


def test_write_atomically_replaces_text(tmp_path):
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    assert write_atomically(path, "né\n") == path
    assert path.read_bytes() == "né\n".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_atomic_file_keeps_old_content_when_the_block_fails(tmp_path):
    path = write_atomically(tmp_path / "a.txt", "old")
    with pytest.raises(KeyError):
        with atomic_file(path) as file:
            file.write(b"half")
            raise KeyError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EACCES, "may write to"),
        (errno.ENOTDIR, "move it away"),
        (errno.EIO, "check"),
    ],
)
def test_disk_errors_named_says_file_cause_and_remedy(number, remedy):
    import os

    with pytest.raises(UserError, match=rf"cannot write runs/a \({os.strerror(number)}\); .*{remedy}") as caught:
        with disk_errors_named("runs/a"):
            raise OSError(number, os.strerror(number))
    assert "\n" not in str(caught.value)


def test_atomic_file_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "a.txt", "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
