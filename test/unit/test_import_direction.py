"""Who may import whom: the rules of docs/architecture.md, read from the sources themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "ResNet50_for_PyTorch" / "DistributedResnet50" / "image_classification"
SEARCHED = [PACKAGE, REPOSITORY / "mmcls", REPOSITORY / "ResNet50_for_PyTorch" / "pytorch_resnet50_apex.py"]

# From the bottom to the top: a module imports modules of lower rows only. A new module must be given its row.
LAYERS = (
    ("config",),
    ("levels",),
    ("resnet", "losses", "schedule", "metrics", "optim", "precision", "checkpoint", "recipes", "data",
     "throughput", "curves", "mixup", "ema", "freezing", "divergence"),
    ("training",),
    ("reporting",),
    ("cli", "placement"),
    ("preflight",),
    ("worker",),
    ("outcome",),
    ("launch",),
    ("__main__",),
)  # fmt: skip
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
LEAVES = LAYERS[2]
NEED_TORCH_ALONE = ("levels", "resnet", "losses", "schedule", "metrics", "ema", "freezing", "divergence")
ONLY_IMPORTERS = {
    "torch_npu": "mmcls/utils/device.py",
    "mmcv": "mmcls/utils/distribution.py",
    "apex": "image_classification/precision.py",
    "timm": "image_classification/optim.py",
}


def source_files(roots):
    """Python files of the roots; a folder without any would make every rule hold, so it is an error."""
    files = []
    for root in roots:
        found = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        assert found and all(path.is_file() for path in found), f"no sources in {root}"
        files += found
    return files


def imports_of(path):
    """Full names of all imports, wherever in a file: `a.b` for `import a.b`, `a.b.c` for `from a.b import c`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno} is a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules_of_package(path):
    """The package's modules that a file imports, by their first name (`data` for image_classification.data.loader)."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("image_classification.")}


def module_name(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


PACKAGE_FILES = [path for path in source_files([PACKAGE]) if path != PACKAGE / "__init__.py"]


def test_a_folder_without_sources_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="no sources"):
        source_files([tmp_path])
    with pytest.raises(AssertionError, match="no sources"):
        source_files([tmp_path / "gone"])


def test_the_parser_sees_every_way_to_import(tmp_path):
    source = tmp_path / "example.py"
    source.write_text(
        "import a.b as c\nfrom d import e\ndef f():\n    try:\n        import g\n    finally:\n        pass\n"
    )
    assert imports_of(source) == {"a.b", "d.e", "g"}
    source.write_text("from . import config\n")
    with pytest.raises(AssertionError, match="relative import"):
        imports_of(source)


def test_every_module_has_a_layer_and_every_layer_its_modules():
    assert {module_name(path) for path in PACKAGE_FILES} == set(LAYER)


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_lower_layers_only(path):
    name = module_name(path)
    others = modules_of_package(path) - {name}
    wrong = sorted(other for other in others if LAYER[other] >= LAYER[name])
    assert not wrong, f"{name} (layer {LAYER[name]}) imports {wrong}"


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_leaf_imports_no_other_leaf(path):
    name = module_name(path)
    if name in LEAVES:
        assert modules_of_package(path) - {name} <= {"config", "levels"}


@pytest.mark.parametrize("name", NEED_TORCH_ALONE)
def test_the_mathematics_needs_torch_alone(name):
    roots = {full.split(".")[0] for full in imports_of(PACKAGE / f"{name}.py")}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "image_classification", "mmcls"}
    assert modules_of_package(PACKAGE / f"{name}.py") <= {"config"}


def test_mmcls_stands_alone():
    for path in source_files([REPOSITORY / "mmcls"]):
        assert not [name for name in imports_of(path) if name.split(".")[0] == "image_classification"], path


@pytest.mark.parametrize("package", ONLY_IMPORTERS)
def test_vendor_packages_have_one_importer(package):
    importers = {
        str(path) for path in source_files(SEARCHED) if package in {name.split(".")[0] for name in imports_of(path)}
    }
    allowed = {str(path) for path in source_files(SEARCHED) if str(path).endswith(ONLY_IMPORTERS[package])}
    assert len(allowed) == 1
    assert importers <= allowed


def test_importing_everything_prints_nothing_and_touches_no_vendor_package():
    names = [f"image_classification.{name}" for name in LAYER]
    code = (
        "import sys\n"
        f"for name in {names}: __import__(name)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        f"found = sorted(set({[*ONLY_IMPORTERS, 'matplotlib']}) & set(sys.modules))\n"
        "assert not found, found\n"
    )
    path = f"{PACKAGE.parent}:{REPOSITORY}"
    done = subprocess.run(
        [sys.executable, "-c", code, "--unknown-option"],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
