#!/bin/sh
# Makes a Python environment with packages of PyPI: python.sh FOLDER PACKAGE...
set -eu

folder=$1
shift
[ -x "$folder/bin/pip" ] || python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
