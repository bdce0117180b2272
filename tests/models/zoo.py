"""All the models, by name."""

from tests.models.language import LANGUAGE
from tests.models.perception import PERCEPTION

ZOO = {entry.name: entry for entry in [*LANGUAGE, *PERCEPTION]}
