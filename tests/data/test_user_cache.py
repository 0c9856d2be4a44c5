"""The user's cache folder: whole files, and nothing that somebody else could have put there."""

import stat

import pytest

from moe_jax.data.user_cache import cache_root, user_cache_folder
from moe_jax.errors import UserError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Cache in tmp_path / 'cache'."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_folder_is_made_for_this_user_alone_where_the_environment_says(home, monkeypatch):
    folder = user_cache_folder("profiles")
    assert folder == home / "cache" / "moe_jax" / "profiles" == user_cache_folder("profiles")
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert str(cache_root()) == "/home/ada/.cache/moe_jax"


def test_link_at_the_folder_is_refused_and_above_the_cache_it_is_the_users_own_choice(home):
    (home / "elsewhere").mkdir()
    (home / "cache").symlink_to(home / "elsewhere")
    root = home / "cache" / "moe_jax"
    assert user_cache_folder("profiles").resolve() == home / "elsewhere" / "moe_jax" / "profiles"
    (root / "linked").symlink_to(home)
    (root / "file").write_text("")
    (root / "open").mkdir()
    (root / "open").chmod(0o770)
    for name, words in (
        ("linked", r"linked' is a link or a file and is not followed; remove it, or set XDG"),
        ("file", r"file' is a link or a file"),
        ("open", r"may be written to by other users \(mode 770\).*delete it, and it is made"),
    ):
        with pytest.raises(UserError, match=words):
            user_cache_folder(name)
    root.chmod(0o775)  # a parent that others may write to is closed
    assert user_cache_folder("profiles").parent == root and stat.S_IMODE(root.stat().st_mode) == 0o755
