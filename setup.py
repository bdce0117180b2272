"""What pyproject.toml can't say of the build.

`dispatch`, `kernels` and `sharding` stand at the root, but install below `lazy_tensor`: top-level
packages of such common names would collide with other people's. Their `__init__.py` lie below
`lazy_tensor` in a checkout too. The C++ is compiled where torch and a compiler are: else the first
programs would wait for it.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

AT_ROOT = ("dispatch", "kernels", "sharding")
PACKAGES = [
    *find_packages(include=["lazy_tensor*"]),
    *(f"lazy_tensor.{top}.{name}" for top in AT_ROOT for name in find_packages(top)),
]


class Build(build_py):
    def run(self) -> None:
        super().run()
        kernels = Path(__file__).resolve().parent / "kernels"
        script = kernels / "extension" / "cpp.py"
        package = Path(self.build_lib).resolve() / "lazy_tensor" / "kernels"
        target = (kernels if self.editable_mode else package) / "built"
        # pip builds in an environment without torch, which it makes by PYTHONPATH
        around = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [sys.executable, "-P", str(script), str(target)]
        if subprocess.run(command, env=around, check=False).returncode:
            print("lazy_tensor's C++ is not compiled now; programs do so in the background")

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Package, name and file of each module."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        if all(name != "__init__" for _, name, _ in found):
            init = str(Path(*package.split("."), "__init__.py"))
            found.append((package, "__init__", init))
        return found


class Wheel(bdist_wheel):
    """A wheel that has compiled C++ fits one Python and one kind of machine, and says so."""

    def run(self) -> None:
        self.run_command("build")
        built = Path(self.get_finalized_command("build").build_lib, "lazy_tensor/kernels/built")
        if any(built.glob("*.so")):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()


setup(
    cmdclass={"bdist_wheel": Wheel, "build_py": Build},
    packages=PACKAGES,
    package_dir={"lazy_tensor": "lazy_tensor", **{f"lazy_tensor.{top}": top for top in AT_ROOT}},
)
