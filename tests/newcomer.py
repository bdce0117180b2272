"""What a newcomer has: a checkout, and an environment that only has what takes long to install."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.kernels.extension import cpp

ROOT = Path(__file__).resolve().parents[1]
PIP = """#!{python}
import sys
from pip._internal.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Newcomer:
    home: Path

    @property
    def checkout(self) -> Path:
        return self.home / "checkout"

    @property
    def elsewhere(self) -> Path:
        return self.home / "elsewhere"

    @property
    def environment(self) -> Path:
        return self.home / "environment"

    @property
    def packages(self) -> Path:
        """Where the environment has what is installed in it."""
        (packages,) = (self.environment / "lib").glob("python*/site-packages")
        return packages

    @property
    def printed(self) -> Path:
        """What the commands printed."""
        return self.home / "printed.txt"

    def run(self, *command: str | Path, folder: Path, **variables: str) -> str:
        """What a command prints that is started in `folder`; it must end with status 0."""
        done = subprocess.run(
            command, cwd=folder, env={**self._variables(), **variables}, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _variables(self) -> dict[str, str]:
        ours = ("LAZY_TENSOR_", "PIP_", "PYTHON", "VIRTUAL_ENV")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PATH": f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.environment),
            "LAZY_TENSOR_CACHE_DIR": str(self.home / "cache"),
            # setuptools is there, and nothing is fetched
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as its option: no isolation
            "PIP_NO_COMPILE": "1",
        }  # fmt: skip


def newcomer_in(home: Path, commands: str) -> Newcomer:
    """A newcomer in `home` who ran `commands` in the checkout: they end with status 0.

    Of several processes that ask for the same newcomer one has it done, the others wait.
    """
    import fcntl

    newcomer = Newcomer(home)
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not newcomer.elsewhere.exists():
            _copy_checkout(newcomer.checkout)
            _make_environment(newcomer)
            printed = newcomer.run("sh", "-e", "-c", commands, folder=newcomer.checkout)
            newcomer.printed.write_text(printed)
            newcomer.elsewhere.mkdir()
    return newcomer


def _copy_checkout(to: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    # Compiled before: it takes half a minute, and `tests/kernels/extension` has it compiled.
    disk = compiler().disk
    for built in (to / "kernels/built", to / "build/lib/lazy_tensor/kernels/built"):
        built.mkdir(parents=True, exist_ok=True)
        for source in (cpp.HITS, cpp.PROGRAM):
            library = source.built() or (disk and disk.get(source.key()))
            if library:
                (built / f"{source.key()}.so").write_bytes(library)


def _make_environment(newcomer: Newcomer) -> None:
    """With pip and with what this Python can import, but without this package."""
    venv.create(newcomer.environment, symlinks=True)
    heavy = [path for path in sys.path if path.endswith("site-packages")]
    # not by an import of pip: setuptools' hook warns then, if distutils was imported before
    heavy.append(str(importlib.metadata.distribution("pip").locate_file("")))
    (newcomer.packages / "heavy.pth").write_text(
        "".join(f"{path}\n" for path in dict.fromkeys(heavy))
    )
    command = newcomer.environment / "bin" / "pip"
    command.write_text(PIP.format(python=command.with_name("python")))
    command.chmod(0o755)
