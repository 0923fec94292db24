"""Every name of torch_npu that our sources use, and the simulator's signatures, against the real wheel.

The wheel's Python sources are read by griffe; nothing of it is imported, so this runs where no NPU is. What is made
in C++ or at import (`torch_npu.npu_format_cast`) cannot be read that way: `UNREADABLE` names it.
"""

import ast
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe")

REPOSITORY = Path(__file__).resolve().parents[2]
SIMULATOR = REPOSITORY / "test" / "npu_simulator"
DEVICE = REPOSITORY / "mmcls" / "utils" / "device.py"
SOURCES = sorted(
    path
    for root in ("mmcls", "ResNet50_for_PyTorch/DistributedResnet50/image_classification")
    for path in (REPOSITORY / root).rglob("*.py")
)
PINNED = next(
    line.strip()
    for line in (REPOSITORY / "requirements-npu.txt").read_text().splitlines()
    if line.startswith("torch_npu==")
)
# All wheels hold the same Python sources; one for a fixed Python and machine can be had from anywhere.
ONE_WHEEL = ("--python-version=3.11", "--platform=manylinux_2_28_x86_64", "--only-binary=:all:", "--no-deps")
NO_NETWORK = ("from versions: none", "ConnectionError", "connection broken", "Temporary failure", "timed out")

UNREADABLE = {
    "torch_npu.get_npu_format": "operators: the package gets them from torch.ops at import",
    "torch_npu.npu_clear_float_status": "operator",
    "torch_npu.npu_format_cast": "operator",
    "torch_npu.npu_get_float_status": "operator",
    "torch_npu.npu.Stream.npu_stream": "comes from the base class in C++",
}
ONLY_SIMULATED = {"torch_npu.SIMULATED", "torch_npu.simulator"}
"""What the simulator adds; our sources ask for `SIMULATED` by `getattr` with a default."""


@dataclass(frozen=True)
class Use:
    """A name of torch_npu in our sources, written `torch_npu.npu.amp.GradScaler`; the call's arguments if it is one."""

    name: str
    where: str
    call: ast.Call | None


def download(folder: Path) -> None:
    """Puts the Python files of the pinned wheel into `folder`, all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--timeout=15", "--retries=1", *ONE_WHEEL]
        done = subprocess.run([*command, f"--dest={name}", PINNED], capture_output=True, text=True)
        if done.returncode and any(sign in done.stderr for sign in NO_NETWORK):
            pytest.skip(f"{PINNED} cannot be downloaded here: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(name, "files"), [path for path in archive.namelist() if path.endswith(".py")])
        shutil.move(Path(name, "files"), folder)


def load(folder: Path) -> griffe.Module:
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escape sequences in the wheel's docstrings
        return griffe.load("torch_npu", search_paths=[folder], allow_inspection=False)


@pytest.fixture(scope="session")
def wheel() -> griffe.Module:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "resnet50-for-ascend"
    folder = cache / PINNED.replace("==", "-")
    if not folder.exists():
        download(folder)
    return load(folder)


@pytest.fixture(scope="session")
def simulator() -> griffe.Module:
    return load(SIMULATOR)


def dotted(node: ast.AST, modules: set[str]) -> str | None:
    """The name that an expression spells, below torch_npu; None for other expressions."""
    if isinstance(node, ast.Name):
        return {"torch_npu": "torch_npu"}.get(node.id, "torch_npu.npu" if node.id in modules else None)
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("torch", "npu"):
            return "torch_npu.npu"
        parent = dotted(node.value, modules)
        return f"{parent}.{node.attr}" if parent else None
    return None


def uses(source: str, where: str) -> Iterator[Use]:
    """Every name of torch_npu in a source: `torch.npu...`, `torch_npu...`, and of a variable set by `_module(...)`."""
    tree = ast.parse(source)
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    modules = {node.targets[0].id for node in assignments if getattr(node.value.func, "id", None) == "_module"}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        name = dotted(node, modules) if isinstance(node, ast.Attribute) and id(node) not in inner else None
        if name:
            yield Use(name, f"{where}:{node.lineno}", calls.get(id(node)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch_npu":
            for alias in node.names:
                yield Use(f"{node.module}.{alias.name}", f"{where}:{node.lineno}", None)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "_npu_has":
            yield Use(f"torch_npu.npu.{node.args[0].value}", f"{where}:{node.lineno}", None)


def find(package: griffe.Module, name: str) -> griffe.Object | None:
    """The object that a dotted name means, through re-exports and instances of classes; None where there is none."""
    found = package
    for part in name.split(".")[1:]:
        try:
            found = found[part]
            found = found.final_target if found.is_alias else found
        except (KeyError, griffe.AliasResolutionError):
            return attribute_of_instance(package, found, part)
    return found


def attribute_of_instance(package: griffe.Module, instance: griffe.Object, name: str) -> griffe.Object | None:
    """Of `conv = npu_config._allowHF32Conv()`, whose attributes exist only as strings in `__setattr__`, that method."""
    if not instance.is_attribute or not isinstance(instance.value, griffe.ExprCall):
        return None
    made_by = find(package, f"{instance.parent.path}.{instance.value.function}")
    setter = made_by and made_by.members.get("__setattr__")
    return setter if setter and f'"{name}"' in setter.source else None


def parameters(found: griffe.Object) -> list[griffe.Parameter] | None:
    """What a function or class takes, less self or cls; None for others, and for a class whose base makes it in C++."""
    if found.is_class:
        found = found.all_members.get("__init__") or found.all_members.get("__new__")
        return list(found.parameters)[1:] if found is not None and found.is_function else None
    return list(found.parameters)[found.parent.is_class :] if found.is_function else None


def problems(package: griffe.Module, source: str, where: str) -> list[str]:
    """What the package lacks of the names in a source, or takes other arguments for."""
    told = []
    for use in uses(source, where):
        found = find(package, use.name)
        if found is None:
            told.append(f"{use.where}: {PINNED} has no {use.name}")
        elif use.call:
            told += [f"{use.where}: {use.name} {text}" for text in unfitting_arguments(use.call, parameters(found))]
    return told


def unfitting_arguments(call: ast.Call, taken: list[griffe.Parameter] | None) -> list[str]:
    if taken is None:
        return ["is no function or class whose arguments can be read"]
    positional = [p for p in taken if p.kind.value.startswith("positional")]
    told = []
    if len(call.args) > len(positional) and not any(p.kind.value == "variadic positional" for p in taken):
        told.append(f"takes {len(positional)} arguments by position, {len(call.args)} given")
    names = {p.name for p in taken}
    told += [f"takes no argument {k.arg}" for k in call.keywords if k.arg not in names]
    given = {p.name for p in positional[: len(call.args)]} | {k.arg for k in call.keywords}
    missing = [p.name for p in taken if p.required and p.name not in given]
    return told + [f"needs the argument {name}" for name in missing]


def test_our_sources_use_what_the_wheel_has(wheel):
    found = [problem for path in SOURCES for problem in problems(wheel, path.read_text(), path.name)]
    assert not found, "\n".join(found)


def test_the_names_are_found():
    """A search that finds nothing would pass every wheel."""
    calls = {use.name: use.call for use in uses(DEVICE.read_text(), "device.py")}
    assert {"torch_npu.npu." + name for name in ("set_device", "synchronize", "amp.GradScaler", "conv.allow_hf32")} <= (
        calls.keys()
    )
    assert calls["torch_npu.npu.set_device"].args
    assert "getattr(torch.npu" not in DEVICE.read_text(), "a computed name cannot be checked"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch.npu.warp_speed()", "has no torch_npu.npu.warp_speed"),
        ("torch.npu.amp.GradScalar()", "has no torch_npu.npu.amp.GradScalar"),
        ("torch.npu.conv.allow_tf32 = False", "has no torch_npu.npu.conv.allow_tf32"),
        ("torch_npu.npu.set_option()", "needs the argument option"),
        ("torch.npu.synchronize(0, 1)", "takes 1 arguments by position, 2 given"),
        ("torch.npu.amp.GradScaler(device='npu')", "takes no argument device"),
        ("module = _module('npu'); module.warp_speed()", "has no torch_npu.npu.warp_speed"),
        ("from torch_npu.npu.amp import warp_speed", "has no torch_npu.npu.amp.warp_speed"),
    ],
)
def test_a_made_up_name_is_found(wheel, line, problem):
    found = problems(wheel, DEVICE.read_text() + line + "\n", "device.py")
    assert len(found) == 1
    assert problem in found[0]


def public_names(package: griffe.Module) -> Iterator[str]:
    """What the simulator offers: names of its packages, public methods of their classes; not modules it imports."""
    for path in ("torch_npu", "torch_npu.npu", "torch_npu.npu.amp", "torch_npu.npu.utils", "torch_npu.optim"):
        module = find(package, path)
        for name, member in module.members.items():
            outside = member.is_alias and not member.target_path.startswith("torch_npu")
            elsewhere = member.is_alias and path == "torch_npu.npu.utils"  # an import of the module for itself
            if name.startswith("_") or outside or elsewhere or name == "load_extension":
                continue
            yield f"{path}.{name}"
            found = find(package, f"{path}.{name}")
            if found.is_class:
                yield from (f"{path}.{name}.{method}" for method in found.members if not method.startswith("_"))


def signature(found: griffe.Object) -> list[tuple[str, str, object]] | None:
    """Name, kind and default of everything that it takes, constants replaced by their values."""
    taken = parameters(found)
    return taken and [(p.name, p.kind.value, default_value(p.default, found.module)) for p in taken]


def default_value(default: str | griffe.Expr | None, module: griffe.Module) -> object:
    """The value of a literal, or of a constant that the module defines or imports; else the text itself."""
    if isinstance(default, griffe.ExprName):
        constant = module[default.name]
        if not constant.is_alias:
            return default_value(constant.value, module)
        imported = find(module.package, constant.target_path)
        return default_value(imported.value, module) if imported else constant.target_path
    try:
        return default and ast.literal_eval(str(default))
    except (ValueError, SyntaxError):
        return ast.unparse(ast.parse(str(default)))


def test_the_simulator_takes_the_arguments_of_the_wheel(wheel, simulator):
    names = sorted(set(public_names(simulator)) - ONLY_SIMULATED)
    assert len(names) > 60
    unreadable, differences = set(), []
    for name in names:
        ours, theirs = find(simulator, name), find(wheel, name)
        if theirs is None:
            unreadable.add(name)
        elif ours.kind != theirs.kind or signature(ours) != signature(theirs):
            differences.append(f"{name}: {signature(ours)}, the wheel has {signature(theirs)}")
    assert unreadable == UNREADABLE.keys()
    assert not differences, "\n".join(differences)
