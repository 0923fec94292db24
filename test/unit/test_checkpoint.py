"""Checkpoints: whole or not there, and strictly read."""

import errno
import os
import pickle

import pytest
import torch
import torchvision

from image_classification import checkpoint
from image_classification.checkpoint import (
    ABSENT,
    BEST,
    KEYS,
    LAST,
    load_weights,
    read_checkpoint,
    read_weights,
    save_checkpoint,
    saved_config,
)
from image_classification.config import TrainConfig, to_plain
from image_classification.recipes import CIFAR_FULL
from image_classification.resnet import build_resnet
from mmcls.utils.errors import RequestError


def network(num_classes=10, arch="resnet18", stem="cifar", width=0.125):
    return build_resnet(arch, num_classes, stem=stem, width_multiplier=width)


def contents_of(model, **changes):
    return dict.fromkeys(KEYS) | {
        "model": model.state_dict(),
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "ema": None,
        "precision": {},
        "step": 7,
        "rng": {"seed": 3},
        "best": [81.5, 2],
        "config": to_plain(CIFAR_FULL),
        "plan": {"steps_per_epoch": 5},
        "num_classes": 10,
        "class_names": ["a", "b"],
    } | changes  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / LAST
    save_checkpoint(contents_of(network()), path)
    return path


def refused(function, *arguments, **options):
    with pytest.raises(RequestError) as caught:
        function(*arguments, **options)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_was_saved_is_read(saved):
    contents = read_checkpoint(str(saved))
    assert contents.keys() == KEYS | ABSENT.keys()
    assert (contents["step"], contents["best"], contents["rng"]) == (7, [81.5, 2], {"seed": 3})
    assert saved_config(contents, str(saved)) == CIFAR_FULL
    model = network()
    load_weights(model, contents["model"], "file")
    assert all(torch.equal(contents["model"][name], value) for name, value in model.state_dict().items())


def test_torch_alone_reads_it_without_running_code(saved):
    assert torch.load(saved, weights_only=True)["step"] == 7


def test_nothing_but_the_file_is_left_beside_it(saved):
    save_checkpoint(contents_of(network(), step=8), saved)
    assert os.listdir(saved.parent) == [LAST]
    assert read_checkpoint(str(saved))["step"] == 8


def test_the_average_and_the_loss_scale_come_back(saved):
    average, scaler = network().state_dict(), {"scale": 1024.0, "_growth_tracker": 17}
    save_checkpoint(contents_of(network(), ema=average, precision=scaler), saved)
    contents = read_checkpoint(str(saved))
    assert contents["precision"] == scaler
    assert contents["ema"].keys() == average.keys()
    assert all(torch.equal(value, average[name]) for name, value in contents["ema"].items())


@pytest.mark.parametrize("names", [("ema",), ("precision",), ("ema", "precision")])
def test_a_file_of_an_earlier_version_lacks_what_it_did_not_know(saved, names):
    contents = torch.load(saved, weights_only=True)
    torch.save({name: value for name, value in contents.items() if name not in names}, saved)
    contents = read_checkpoint(str(saved))
    assert (contents["ema"], contents["precision"], contents["step"]) == (None, {}, 7)


@pytest.mark.parametrize("missing", sorted(KEYS))
def test_a_file_that_lacks_anything_else_is_not_resumed(saved, missing):
    contents = torch.load(saved, weights_only=True)
    del contents[missing]
    torch.save(contents, saved)
    assert "another program" in refused(read_checkpoint, str(saved)).problem


@pytest.mark.parametrize("missing", ["optimizer", "ema", "precision"])
def test_a_checkpoint_that_is_not_complete_is_not_written(tmp_path, missing):
    contents = contents_of(network())
    del contents[missing]
    with pytest.raises(AssertionError):
        save_checkpoint(contents, tmp_path / LAST)
    assert not os.listdir(tmp_path)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("cannot be saved")


@pytest.mark.parametrize("moment", ["in the contents", "while writing", "while flushing", "interrupted"])
def test_a_failure_while_saving_leaves_the_earlier_file_alone(saved, monkeypatch, moment):
    before, contents = saved.read_bytes(), contents_of(network(), step=8)
    expected = OSError
    if moment == "in the contents":
        contents["best"], expected = Unpicklable(), TypeError
    elif moment == "while writing":

        def save(_, file):
            file.write(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoint.torch, "save", save)
    elif moment == "while flushing":

        def fsync(_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    else:
        expected = KeyboardInterrupt

        def save(_, file):
            file.write(b"half a file")
            raise KeyboardInterrupt

        monkeypatch.setattr(checkpoint.torch, "save", save)
    with pytest.raises(expected):
        save_checkpoint(contents, saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [LAST]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_leaves_the_earlier_file_alone(saved):
    before = saved.read_bytes()
    temporary = saved.with_name(f".{LAST}.tmp")
    temporary.symlink_to("/dev/full")
    with pytest.raises((OSError, RuntimeError)):
        save_checkpoint(contents_of(network()), saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [LAST]


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE_FOLDER"],)


@pytest.mark.parametrize("read", [read_checkpoint, read_weights])
@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_code_in_a_file_is_never_run(tmp_path, monkeypatch, read, protocol):
    folder, path = tmp_path / "made", tmp_path / "hostile.pth"
    monkeypatch.setenv("HOSTILE_FOLDER", str(folder))
    contents = contents_of(network(), best=Hostile())
    if protocol == "torch":
        torch.save(contents, path)
    else:
        path.write_bytes(pickle.dumps({"model": Hostile()}, protocol=2))
    assert "not a readable checkpoint" in refused(read, str(path)).problem
    assert not folder.exists()


@pytest.mark.parametrize(("read", "flag"), [(read_checkpoint, "--resume"), (read_weights, "--pretrained")])
class TestWrongFiles:
    def test_missing(self, saved, read, flag):
        path = saved.parent / "checkpoint_lst.pth.tar"
        error = refused(read, str(path))
        assert (error.subject, error.problem) == (f"{flag}={path}", "no such file")
        assert LAST in error.remedy

    def test_missing_folder(self, tmp_path, read, flag):
        assert refused(read, str(tmp_path / "a" / "b.pth")).problem == "no such file"

    def test_folder(self, saved, read, flag):
        save_checkpoint(contents_of(network()), saved.with_name(BEST))
        error = refused(read, str(saved.parent))
        assert error.problem == "is a folder"
        assert LAST in error.remedy and BEST in error.remedy

    def test_empty(self, tmp_path, read, flag):
        (tmp_path / "empty.pth").touch()
        assert "0 bytes" in refused(read, str(tmp_path / "empty.pth")).problem

    @pytest.mark.parametrize("part", [0.01, 0.5, 0.999])
    def test_truncated(self, saved, read, flag, part):
        whole = saved.read_bytes()
        saved.write_bytes(whole[: int(part * len(whole))])
        assert f"{int(part * len(whole))} bytes" in refused(read, str(saved)).problem

    @pytest.mark.parametrize("content", [b"text\n", b"\xff\xd8\xff\xe0JFIF", b"PK\x03\x04", b"\x80\x02K\x01."])
    def test_no_checkpoint_at_all(self, tmp_path, read, flag, content):
        (tmp_path / "picture.pth").write_bytes(content)
        assert refused(read, str(tmp_path / "picture.pth")).subject == f"{flag}={tmp_path / 'picture.pth'}"

    @pytest.mark.parametrize(
        "content", [[1, 2], 3, {}, {"a": 1}, torch.ones(2), {"state_dict": {}}, {"model": [1]}, {0: torch.ones(1)}]
    )
    def test_other_contents(self, tmp_path, read, flag, content):
        torch.save(content, tmp_path / "other.pth")
        assert refused(read, str(tmp_path / "other.pth")).subject == f"{flag}={tmp_path / 'other.pth'}"


def test_weights_alone_cannot_be_resumed(tmp_path):
    for contents in (network().state_dict(), {"model": network().state_dict()}):
        torch.save(contents, tmp_path / "weights.pth")
        error = refused(read_checkpoint, str(tmp_path / "weights.pth"))
        assert "weights only" in error.problem and "--pretrained" in error.remedy


def test_a_home_folder_is_found(saved, monkeypatch):
    monkeypatch.setenv("HOME", str(saved.parent))
    assert read_checkpoint(f"~/{LAST}")["step"] == 7


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_weights_with_any_wrapping_load(tmp_path, prefix, key):
    model, fresh = network(), network()
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    torch.save({key: weights, "epoch": 3} if key else weights, tmp_path / "weights.pth")
    load_weights(fresh, read_weights(str(tmp_path / "weights.pth")), "file")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_missing_and_an_unexpected_key_are_named():
    weights = network().state_dict()
    del weights["layer1.0.conv1.weight"]
    error = refused(load_weights, network(), weights, "--pretrained=x", "if needed")
    assert error.subject == "--pretrained=x"
    assert "missing layer1.0.conv1.weight" in error.problem
    weights = network().state_dict() | {"layer9.weight": torch.ones(1)}
    assert "unexpected layer9.weight" in refused(load_weights, network(), weights, "x", "if needed").problem


def test_shapes_that_differ_are_named():
    error = refused(load_weights, network(), network(width=0.25).state_dict(), "x")
    assert "weight is (" in error.problem
    error = refused(load_weights, network(3), network(10).state_dict(), "x")
    assert "fc." in error.problem and "(10" in error.problem and "(3" in error.problem


def test_nothing_is_loaded_from_a_file_that_is_refused():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = network().state_dict()
    weights["fc.bias"] = torch.ones(11)
    refused(load_weights, model, weights, "x")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_new_last_layer_where_the_number_of_classes_differs():
    source, model = network(1000), network(3)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    note = load_weights(model, source.state_dict(), "--pretrained=x", "if needed")
    assert "--pretrained=x" in note and "1000 classes" in note and "3 here" in note
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name] if name.startswith("fc.") else source.state_dict()[name])


def test_the_last_layer_is_taken_where_it_fits():
    source, model = network(10), network(10)
    assert load_weights(model, source.state_dict(), "x", "if needed") is None
    assert torch.equal(model.fc.weight, source.fc.weight)


@pytest.mark.parametrize("num_classes", [10, 1000])
def test_a_new_last_layer_in_any_case(num_classes):
    source, model = network(num_classes), network(10)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    note = load_weights(model, source.state_dict(), "--pretrained=x", "always")
    assert note == f"--pretrained=x: {num_classes} classes there, 10 here: new last layer"
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name] if name.startswith("fc.") else source.state_dict()[name])


def test_weights_without_a_last_layer_fit_a_new_one_alone():
    source, model = network(), network()
    weights = {name: value for name, value in source.state_dict().items() if not name.startswith("fc.")}
    for new_head in ("never", "if needed"):
        assert "missing fc.bias (of 2)" in refused(load_weights, model, weights, "x", new_head).problem
    assert "new last layer" in load_weights(model, weights, "x", "always")
    assert torch.equal(model.conv1.weight, source.conv1.weight)


@pytest.mark.parametrize("new_head", ["never", "if needed", "always"])
def test_no_last_layer_makes_up_for_another_network(new_head):
    weights = network().state_dict()
    del weights["conv1.weight"]
    assert "missing conv1.weight" in refused(load_weights, network(), weights, "x", new_head).problem
    wider = network(width=0.25).state_dict()
    assert "weight is (" in refused(load_weights, network(), wider, "x", new_head).problem


@pytest.mark.parametrize("new_head", ["never", "if needed", "always"])
def test_on_the_meta_device_weights_are_checked_and_not_loaded(new_head):
    with torch.device("meta"):
        model = network(3)
    weights = network(10).state_dict()
    if new_head == "never":
        assert "(10" in refused(load_weights, model, weights, "x", new_head).problem
    else:
        assert "10 classes there, 3 here" in load_weights(model, weights, "x", new_head)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("old", [False, True], ids=["of today", "before num_batches_tracked"])
def test_weights_of_torchvision_load_and_give_its_logits(tmp_path, old):
    """Files from before torch 0.4.1 lack a counter; torch's own strict loading takes them."""
    reference = torchvision.models.resnet18(num_classes=10).eval()
    weights = reference.state_dict()
    if old:
        weights = {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
        torchvision.models.resnet18(num_classes=10).load_state_dict(weights, strict=True)
    torch.save(weights, tmp_path / "resnet18.pth")
    model = network(stem="imagenet", width=1.0).eval()
    load_weights(model, read_weights(str(tmp_path / "resnet18.pth")), "x")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images), rtol=0, atol=1e-5)


def test_our_weights_load_into_torchvision(tmp_path):
    path = tmp_path / BEST
    model = network(stem="imagenet", width=1.0)
    save_checkpoint(contents_of(model), path)
    torchvision.models.resnet18(num_classes=10).load_state_dict(
        torch.load(path, weights_only=True)["model"], strict=True
    )


def test_a_configuration_of_another_version_is_refused():
    plain = to_plain(TrainConfig())
    plain["optim"]["unheard_of"] = 1
    error = refused(saved_config, {"config": plain}, "x.pth")
    assert error.subject == "--resume=x.pth"
    assert "unheard_of" in error.problem
