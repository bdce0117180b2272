"""Installing the package compiles its C++ too, where torch and a compiler are: else the first
programs would wait for it. All else is in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCpp(build_py):
    def run(self) -> None:
        super().run()
        script = Path(__file__).resolve().parent / "kernels" / "cpp.py"
        package = Path(self.build_lib).resolve() / "lazy_tensor" / "kernels"
        target = (script.parent if self.editable_mode else package) / "built"
        # pip builds in an environment without torch, which it makes by PYTHONPATH
        around = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [sys.executable, "-P", str(script), str(target)]
        if subprocess.run(command, env=around, check=False).returncode:
            print("lazy_tensor's C++ is not compiled now; programs do so in the background")


setup(cmdclass={"build_py": BuildWithCpp})
