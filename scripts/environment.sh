# Makes the virtual environment that demo.sh and test.sh run in. Sourced, with the repository root as current folder.
# Plain POSIX tools only, so that Linux and macOS run the same lines.

# find_python [MINOR]: prints the first Python of at least 3.11, or 3.MINOR. Each is tried by running it, because a name
# on PATH may be an empty shim of a version manager.
find_python() {
  least=${1:-11}
  for candidate in python3.12 python3.11 python3; do
    if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, $least))" >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "moe_jax needs Python 3.$least or newer here: none of python3.12, python3.11 and python3 is; install one from" \
    "python.org" >&2
  return 2
}

# requirements_of [HEADING...]: prints the lines of requirements.txt under these headings, or all of them, and
# setuptools, which builds the package.
requirements_of() {
  awk -v headings=" $* " '
    /^# \[/ { gsub(/[^a-z]/, "", $2); wanted = index(headings, " " $2 " ") }
    NF && !/^#/ && (wanted || headings == "  " || /^setuptools/)' requirements.txt
}

# make_environment FOLDER HEADINGS [REQUIREMENT...]: makes FOLDER, with the requirements under HEADINGS (words in one
# argument; '' is all) and the further ones installed, and this checkout's package as an editable install; made with a
# Python of at least 3.$least_minor where that is set.
# A call whose requirements are all there returns at once: what was installed stands in FOLDER/installed.txt, written
# last, so an interrupted installation is done again.
make_environment() {
  folder=$1
  # shellcheck disable=SC2086
  wanted=$(requirements_of $2)
  shift 2
  if ! "$folder/bin/python" -c '' >/dev/null 2>&1; then
    python=$(find_python "${least_minor:-11}") || return 2
    echo "making $folder with $("$python" --version)" >&2
    rm -f "$folder/installed.txt" "$folder/package.txt"
    if ! "$python" -m venv "$folder" >&2; then
      echo "$python cannot make a virtual environment; on Debian and Ubuntu install the package python3-venv" >&2
      return 2
    fi
  fi
  printf '%s\n' "$wanted" "$@" >"$folder/wanted.txt"
  touch "$folder/installed.txt"
  if ! grep -qvxFf "$folder/installed.txt" "$folder/wanted.txt"; then
    install_package "$folder"
    return
  fi
  echo "installing the requirements into $folder (minutes the first time)" >&2
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$folder/wanted.txt" >&2 || {
    echo "installation into $folder failed; see the lines above, then run the same command again" >&2
    return 2
  }
  install_package "$folder" || return 2
  mv "$folder/wanted.txt" "$folder/installed.txt"
}

# install_package FOLDER: makes `import moe_jax` find this checkout from anywhere, so that scripts need no path. What was
# done stands in FOLDER/package.txt. It is built with FOLDER's own setuptools, a requirement, so that an environment that
# has its requirements needs no network.
install_package() {
  if [ -f "$1/package.txt" ] && [ "$(cat "$1/package.txt")" = "$PWD" ]; then
    return 0
  fi
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e . >&2 || {
    echo "installing moe_jax itself into $1 failed; see the lines above, then run the same command again" >&2
    return 2
  }
  printf '%s\n' "$PWD" >"$1/package.txt"
}
