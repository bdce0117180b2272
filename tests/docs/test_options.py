"""The page of options says what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from lazy_tensor.capture.replay import OWN_OPTIONS
from lazy_tensor.dispatch.options import KNOWN

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "options.md").read_text()
TABLE = runpy.run_path(str(DOCS / "options_table.py"))


def test_the_table_is_as_the_code_has_it_now():
    assert TABLE["page_with_table"](PAGE) == PAGE, "run python docs/options_table.py"


def test_each_option_has_a_meaning_of_one_sentence():
    meanings = TABLE["MEANINGS"]
    assert tuple(meanings) == KNOWN
    for name, meaning in meanings.items():
        assert meaning.endswith("."), name
        assert ". " not in meaning, name
        assert len(meaning.split()) <= 25, name


def test_options_of_replay_are_in_its_table():
    _, _, rest = PAGE.partition("## Options of `replay`")
    section, _, _ = rest.partition("\n## ")
    assert tuple(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)) == OWN_OPTIONS
