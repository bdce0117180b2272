"""The arrows between the folders, and where private names of torch may stand."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "dispatch": {"dispatch", "kernels"},
    "lazy_tensor": {"lazy_tensor", "dispatch", "kernels"},
    "sharding": {"sharding", "lazy_tensor", "dispatch", "kernels"},
}
# The packages of a folder, "" for the files that lie in none: each may import those before it.
PACKAGES = {
    "dispatch": (
        "torch_private", "", "ops", "metadata", "tiering", "trie", "torch_checks", "plan", "run",
        "record",
    ),
    "kernels": ("", "extension", "loops", "backends", "nvfuser", "service"),
    "sharding": ("", "ops", "fsdp"),
}  # fmt: skip
MOST_FILES = 12
ADAPTERS = {
    *(f"dispatch/torch_private/{path.name}" for path in ROOT.glob("dispatch/torch_private/*.py")),
    "kernels/backends/torch_inductor.py", "kernels/nvfuser/torch_private.py",
    "lazy_tensor/interop/torch_ways.py", "sharding/fsdp/torch_private.py",
    "sharding/torch_private.py",
}  # fmt: skip
# What torch's own documentation, or other libraries, use under these names.
PUBLIC_IN_ALL_BUT_NAME = {
    "torch._inductor",  # its `config`
    "torch._ops",  # OpOverload
    "torch._prims_common",  # Python's type promotion
    "torch._subclasses",  # FakeTensorMode
    "torch.utils._pytree",
}
SOURCES = sorted(
    path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py") if path.is_file()
)


def imports_of(path, *, with_types=True):
    tree = ast.parse(path.read_text())
    if not with_types:
        tree.body = [one for one in tree.body if not is_for_types(one)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def layer_at(path):
    """The folder whose layer a file belongs to; the `__init__.py` of most lie in `lazy_tensor`."""
    first, second, *_ = path.relative_to(ROOT).parts
    return second if second in MAY_IMPORT else first


def layer_of(module, names):
    """The folders of ours that an import reaches."""
    parts = module.split(".")
    if parts[0] != "lazy_tensor":
        return set()
    if len(parts) == 1:
        return {name if name in MAY_IMPORT else "lazy_tensor" for name in names}
    return {parts[1] if parts[1] in MAY_IMPORT else "lazy_tensor"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    layer = layer_at(path)
    for module, names in imports_of(path):
        assert layer_of(module, names) <= MAY_IMPORT[layer], f"{path.name} imports {module}"


def package_at(path):
    """The package that a file lies in, "" if in none."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else ""


def packages_of(folder, module, names):
    """The packages of the folder that an import reaches, "" for files in none."""
    top, _, rest = module.removeprefix("lazy_tensor.").partition(".")
    if top != folder or not module.startswith("lazy_tensor."):
        return set()
    if not rest:
        return {name if name in PACKAGES[folder] else "" for name in names}
    package = rest.partition(".")[0]
    return {package if package in PACKAGES[folder] else ""}


@pytest.mark.parametrize("folder", PACKAGES)
def test_all_packages_are_named(folder):
    found = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert {"", *found} == set(PACKAGES[folder])


@pytest.mark.parametrize("folder", PACKAGES)
def test_packages_import_those_before_them(folder):
    order = {package: i for i, package in enumerate(PACKAGES[folder])}
    for path in (ROOT / folder).rglob("*.py"):
        package = package_at(path)
        for module, names in imports_of(path, with_types=False):
            for other in packages_of(folder, module, names):
                names_it = f"{path.relative_to(ROOT)} imports {module}"
                assert order[other] <= order[package], names_it


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_packages_are_small(folder):
    folders = {path.parent for path in (ROOT / folder).rglob("*.py")}
    for one in folders:
        n_files = len(list(one.glob("*.py")))
        assert n_files <= MOST_FILES, f"{one.relative_to(ROOT)} has {n_files} files"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_torch_names_stand_in_adapters(path):
    if str(path.relative_to(ROOT)) in ADAPTERS:
        return
    tree = ast.parse(path.read_text())
    for module, names in imports_of(path):
        if module in PUBLIC_IN_ALL_BUT_NAME or not module.startswith("torch"):
            continue
        private = [part for part in (*module.split("."), *names) if part.startswith("_")]
        allowed = module == "torch.utils" and private == ["_pytree"]
        assert not private or allowed or module == "torch._C", f"{path.name} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_private = (
                node.value.id == "torch"
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            )
            assert not is_private, f"{path.name}:{node.lineno} uses torch.{node.attr}"
