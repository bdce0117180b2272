"""The README's first example prints what the README says."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_first_example_prints_the_output_below_it(capsys):
    blocks = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (language, code), (output_language, output) = blocks[:2]
    assert (language, output_language) == ("python", "text")
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out == output
