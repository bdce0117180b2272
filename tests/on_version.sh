#!/bin/sh
# on_version.sh PYTHON TORCH FOLDER ARGUMENTS...: run pytest in an environment of these versions in
# FOLDER, which is made when it isn't there; the package is installed into it as it stands.
# Without that Python: a line that says so, and no error.
set -eu
version=$1 torch=$2 folder=$3
shift 3
python=$(command -v "python$version" || true)
# a shim of pyenv's is there for Pythons that it can't run
if [ -z "$python" ] || ! "$python" -c '' 2>/dev/null; then
    python=$(ls -d "$HOME/.pyenv/versions/$version".*/bin/python 2>/dev/null | tail -n 1 || true)
fi
if [ -z "$python" ]; then
    echo "skipped: Python $version with torch $torch: there is no python$version; install it to test with it"
    exit 0
fi
stamp=$folder/.installed-$(cksum < pyproject.toml | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
    [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet "torch==$torch"
    "$folder/bin/python" -m pip install --quiet '.[test]' "torch==$torch"
    rm -f "$folder"/.installed-*
    touch "$stamp"
fi
# not by a link to the checkout: its compiled C++ would take the place of another version's there
"$folder/bin/python" -m pip install --quiet --no-deps --force-reinstall .
echo "Python $version with torch $torch"
# torch's compiler says so of Python 3.13.0, and warnings are errors in tests
exec "$folder/bin/pytest" -W 'ignore:Guards may run slower on Python 3.13.0:RuntimeWarning' "$@"
