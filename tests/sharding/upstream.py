"""PyTorch's own tests of DTensor against ours: `python tests/sharding/upstream.py TESTS [FILE]`.

TESTS is the folder `test/distributed` of a PyTorch source tree; FILEs are paths below it. Each is
run twice, as it stands and with our names in place of torch's; what passes against torch's DTensor
counts, and of that what passes against ours. Prints a page, `benches/results/upstream.md`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

HERE = Path(__file__).parent
FSDP = "_composable/fsdp"
SECONDS = 3000
"""The most that one file may take on one side; a file that takes longer counts as not run."""

FILES = [
    "_tensor/test_api.py", "_tensor/test_common_rules.py", "_tensor/test_convolution_ops.py",
    "_tensor/test_dtensor.py", "_tensor/test_embedding_ops.py", "_tensor/test_experimental_ops.py",
    "_tensor/test_init.py", "_tensor/test_math_ops.py", "_tensor/test_matrix_ops.py",
    "_tensor/test_op_strategy.py", "_tensor/test_optimizers.py", "_tensor/test_pointwise_ops.py",
    "_tensor/test_random_ops.py", "_tensor/test_redistribute.py", "_tensor/test_tensor_ops.py",
    "_tensor/test_utils.py", "_tensor/test_view_ops.py", "_tensor/experimental/test_local_map.py",
    "_tensor/experimental/test_register_sharding.py", "tensor/parallel/test_parallelize_api.py",
    "tensor/parallel/test_tp_examples.py", "tensor/parallel/test_tp_style.py",
    "tensor/parallel/test_tp_random_state.py",
    *(f"{FSDP}/test_fully_shard_{name}.py" for name in (
        "autograd", "clip_grad_norm_", "comm", "frozen", "grad_scaler", "init", "memory",
        "mixed_precision", "state", "state_dict", "training",
    )),
]  # fmt: skip
ON_CPU = {
    r"^ *@skip_if_lt_x_gpu\(.*\)\n": "",
    r"^ *@unittest.skipIf\(not TEST_CUDA, .*\)\n": "",
    r"^ *@?test_compiled_fsdp(,|\(.*\))\n": "",
    r"\bTEST_CUDA\b": "True",
    r"(min\(\d, )?torch.cuda.device_count\(\)\)?": "4",
    r"torch.device\(\"cuda\", [^)]*\)\)": 'torch.device("cpu")',
    r"torch.device\(\"cuda\", [^)]*\)": 'torch.device("cpu")',
    r"\"cuda(:0)?\"": '"cpu"',
    r"\.cuda\(\)": ".cpu()",
    r"device_ids=\[self.rank\],?": "",
    r"import True(, \w+)?\n": "import TEST_CUDA as _\n",
}  # fmt: skip
"""What keeps torch's tests of `fully_shard` from running without a GPU, and what to write then."""

ON_PURPOSE = {
    "test_dropout_errors": "dropout of partial tensors is computed, not refused",
    "test_dtensor_async_output": "what is awaited is a lazy tensor, no `AsyncCollectiveTensor`",
    "test_fill_inplace_partial_sum": "filled with 8 the whole tensor is 8, not 8 for each rank",
    "test_fully_shard_multi_module_unused_module": "it watches methods of torch's groups",
    "test_gather": "masked on the spot: plain `Partial`, no `_MaskPartial`",
    "test_init_ops": "random numbers are those of one process",
    "test_manual_reshard_with_reshard_after_forward_false": "it counts `c10d`'s own collectives",
    "test_multiple_embeddings_rowwise": "masked on the spot: plain `Partial`",
    "test_sharded_embedding_colwise_max_norm_errors": "computed, not refused",
    "test_sharded_embedding_rowwise": "masked on the spot: plain `Partial`",
    "test_to_local": "`to_local()` gives another handle on the local tensor",
    "test_train_mixed_requires_grad_across_groups": "it counts torch's own autograd nodes",
}
"""Tests that fail because ours is meant to differ, and how."""


def on_cpu(tests: Path) -> Path:
    """A copy of the tests of `fully_shard` that runs without a GPU."""
    folder = Path(tempfile.mkdtemp())
    (folder / FSDP).mkdir(parents=True)
    for path in (tests / FSDP).glob("*.py"):
        text = path.read_text()
        for pattern, new in ON_CPU.items():
            text = re.sub(pattern, new, text, flags=re.MULTILINE)
        ranks = "import torch; torch.accelerator.device_count = lambda: 4\n"
        (folder / FSDP / path.name).write_text(ranks + text)
    return folder


def outcomes(tests: Path, name: str, *, ours: bool) -> dict[str, str]:
    """Each test of the file and what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        path = os.environ.get("PYTHONPATH", "")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if ours:
            env["PYTHONPATH"] = f"{HERE / 'substitute'}:{path}"
            env["UPSTREAM_TESTS"] = str(tests)
            env["LAZY_TENSOR_COMPILE"] = "off"
        command = [
            sys.executable, "-m", "pytest", "-q", "--assert=plain", "-p", "no:cacheprovider",
            f"--junitxml={report}", "--rootdir", str(tests), "-c", os.devnull, str(tests / name),
        ]  # fmt: skip
        log = Path(os.environ.get("UPSTREAM_LOGS", folder)) / f"{name.replace('/', '_')}.{ours}.log"
        with log.open("w") as out:
            run = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
            try:
                run.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)  # its ranks too
                run.wait()
        if not report.exists():
            return {}
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            found[f"{case.get('classname')}.{case.get('name')}"] = bad[0] if bad else "passed"
        return found


def _told(test: str, outcome: str) -> str:
    return f"`{test}` ({ON_PURPOSE.get(test, outcome)})"


def main() -> None:
    tests = Path(sys.argv[1]).resolve()
    cpu_tests = on_cpu(tests)
    total = good = 0
    print("# PyTorch's own tests of DTensor and `fully_shard`, run against ours\n")
    print(f"- torch {torch.__version__}, on the CPU; tests of {tests.parents[1].name}")
    print("- command: `python tests/sharding/upstream.py TESTS`")
    print("- of the tests that pass against torch's own, those that pass against ours\n")
    print("| file | passed | of | the others |\n| --- | --- | --- | --- |", flush=True)
    for name in sys.argv[2:] or FILES:
        where = cpu_tests if name.startswith(FSDP) else tests
        known = Path(os.environ.get("UPSTREAM_LOGS", "/nonexistent")) / "torch.json"
        before = json.loads(known.read_text()) if known.exists() else {}
        torchs = before.get(name) or outcomes(where, name, ours=False)
        if known.parent.exists():
            known.write_text(json.dumps({**before, name: torchs}))
        ours = outcomes(where, name, ours=True)
        counted = [test for test, result in torchs.items() if result == "passed"]
        failed = [test for test in counted if ours.get(test) != "passed"]
        total += len(counted)
        good += len(counted) - len(failed)
        names = [_told(test.rpartition(".")[2], ours.get(test, "not run")) for test in failed]
        passed = len(counted) - len(failed)
        print(f"| `{name}` | {passed} | {len(counted)} | {', '.join(names)} |", flush=True)
    print(f"| all | {good} | {total} | |")


if __name__ == "__main__":
    main()
