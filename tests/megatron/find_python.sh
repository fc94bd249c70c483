#!/bin/sh
# Prints a Python that megatron-core with megatron.training runs on (3.12 or later), or nothing.
# A name on PATH may be pyenv's shim for a version that is not selected: each is run to find out.
{
  for name in python3.12 python3.13 python3.14 python3 python; do
    command -v "$name"
  done
  root=$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")
  ls -d "$root"/versions/3.1[2-9]*/bin/python 2>/dev/null
} | while read -r candidate; do
  if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "$candidate"
    break
  fi
done
