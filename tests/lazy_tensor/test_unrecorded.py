"""What is relied on is checked at import; where it fails, programs run as in eager, warned once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lazy_tensor
from lazy_tensor import unrecorded
from lazy_tensor.cli.main import main
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.torch_checks import assumptions, names
from lazy_tensor.dispatch.trie.liveness import live_values
from lazy_tensor.interop import torch_ways
from tests.processes import run_python

PROGRAM = Path(__file__).with_name("unrecorded_program.py")
OFF = "lazy_tensor: recording is off, and programs run as in eager: "


def outcomes(what):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what], capture_output=True, text=True, check=False,
        timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_outcome(outcome):
    assert "failed" not in outcome, outcome["failed"]
    assert outcome["same"], outcome
    (warning,) = outcome["warnings"]
    assert warning.startswith(OFF)
    assert outcome["change"] in warning
    assert "`python -m lazy_tensor doctor` lists the checks" in warning
    assert "import torch.distributed.tensor" in outcome["sharding"]


def test_a_step_is_eagers_with_one_warning_whatever_works_differently():
    found = outcomes("changes")
    assert len(found) == 14
    for outcome in found:
        check_outcome(outcome)


def test_a_step_is_eagers_with_one_warning_whatever_name_torch_lacks():
    found = outcomes("names")
    assert len(found) == len(names.NEEDED) + len(names.OF_OBJECTS)
    for outcome in found:
        check_outcome(outcome)


def sources_of(module):
    """Those of a module, or of all of a package."""
    path = Path(module.__file__)
    paths = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    return [one.read_text() for one in paths]


def names_in(module):
    """The names of torch in a module's source that have a part with an underscore in front."""
    return set().union(*map(names_in_source, sources_of(module)))


def names_in_source(source):
    tree = ast.parse(source)
    meant = {"torch": "torch"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                meant[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")

    def dotted(node):
        if isinstance(node, ast.Name):
            return meant.get(node.id)
        owner = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return owner and f"{owner}.{node.attr}"

    found |= {name for node in ast.walk(tree) if (name := dotted(node))}
    private = {name for name in found if any(part.startswith("_") for part in name.split("."))}
    return {n for n in private if not any(other.startswith(f"{n}.") for other in private)}


def test_every_private_name_that_is_used_is_checked():
    used = names_in(torch_private) | names_in(torch_ways)
    done_without = {"torch._C._distributed_c10d.Reducer"}  # where torch.distributed isn't
    assert used - done_without - {"torch._ops.OpOverload"} == set(names.NEEDED)


@pytest.mark.parametrize("name", names.OF_OBJECTS)
def test_names_that_objects_are_asked_for_are_used(name):
    assert f".{name.rpartition('.')[2]}" in "".join(sources_of(torch_private))


def test_all_checks_hold_here():
    assert assumptions.failed() == ()
    assert len(assumptions.checks()) == 13
    assert assumptions.why_off() == ""


def test_checks_hold_whatever_the_program_has_set():
    """They run in a thread of their own: who imports the package may be in any mode."""
    with torch.inference_mode(), torch.device("meta"), lazy_tensor.lazy_mode(record="always"):
        assert all(not c.problem for c in assumptions.checks.__wrapped__())


def test_a_value_without_an_owner_is_told_from_one_with():
    owned = [object()]
    values = [object(), owned[0]]
    assert live_values(values) == owned


def test_names_of_the_package_are_there_when_recording_is_off():
    assert all(hasattr(unrecorded, name) for name in lazy_tensor.__all__)
    assert set(unrecorded.stats()) == set(lazy_tensor.stats())


def test_mistakes_raise_when_recording_is_off_too():
    with pytest.raises(TypeError, match=r"lazy_mode\(\): unknown option"):
        unrecorded.lazy_mode(backened="aten")
    with pytest.raises(TypeError, match="it takes a torch.Tensor or an nn.Module"):
        unrecorded.wrap(3)
    with pytest.raises(TypeError, match=r"replay\(\): function=3"):
        unrecorded.Replay(3)  # type: ignore[arg-type]


ELSEWHERE = """
import platform, sys, torch
{change}
import lazy_tensor
from lazy_tensor.cli.main import main

def step(x):
    return (x.sin() * 2 + 1).sum().item()

x = torch.ones(3, 1)
expected = step(x)
for _ in range(300):
    with lazy_tensor.lazy_mode():
        assert step(x) == expected
assert lazy_tensor.replay(step)(x) == expected
main(["doctor"])
"""


def test_windows_is_refused_in_one_line():
    code = ELSEWHERE.format(change="platform.system = lambda: 'Windows'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (warning,) = [line for line in done.stderr.splitlines() if OFF in line]
    assert "this is Windows" in warning
    assert "use WSL, which is Linux" in warning


def test_without_the_recorder_for_linux_programs_are_eagers(tmp_path):
    change = (
        "import pathlib, torch._inductor.config\n"
        "from lazy_tensor.kernels.extension import cpp\n"
        "cpp.BUILT, sys.platform = pathlib.Path('nothing is built'), 'darwin'"
    )
    shown = run_python("-c", ELSEWHERE.format(change=change), LAZY_TENSOR_CACHE_DIR=str(tmp_path))
    assert "is for Linux only" in shown


def test_doctor_lists_the_checks(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(f"holds                 {check.name}" in shown for check in assumptions.checks())


WITHOUT_CLONES = """
import runpy, sys, torch
del torch._lazy_clone
sys.argv = ["lazy_tensor", {command!r}]
runpy.run_module("lazy_tensor", run_name="__main__", alter_sys=True)
"""


def run_without_clones(command):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_CLONES.format(command=command)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_doctor_says_what_failed_when_recording_is_off():
    done = run_without_clones("doctor")
    assert done.returncode == 0
    assert "failed                torch's private names exist" in done.stdout
    assert "torch has no torch._lazy_clone; use torch 2.10 to 2.13" in done.stdout


def test_other_commands_say_why_they_can_not_run_when_recording_is_off():
    done = run_without_clones("explain")
    assert done.returncode == 2
    assert done.stderr.startswith("lazy_tensor explain: recording is off: torch has no torch._lazy")
