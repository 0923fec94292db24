"""What a wrong request gets: exit status 2, one line that names the flag and the remedy, and no run folder."""

import shutil

import pytest
import torch

from image_classification.launch import main


@pytest.fixture
def refuse(capsys, tmp_path, monkeypatch):
    """Calls the program and returns the one line that it must print."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    output = tmp_path / "output"

    def call(*arguments: str) -> str:
        assert main([*arguments, f"--output_dir={output}"]) == 2
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("error: ")
        assert "; " in lines[0], "no remedy"
        assert not output.exists()
        assert "Final" not in captured.out
        return lines[0]

    return call


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epoch=3"], ["--epoch", "unknown option", "--epochs"]),
        (["--data_pathx=digits"], ["--data_pathx", "--data_path"]),
        (["foo"], ["foo", "not an option"]),
        (["--batch_size=0"], ["--batch_size=0", ">=1"]),
        (["--batch_size=-4"], ["--batch_size=-4", ">=1"]),
        (["--batch_size=many"], ["--batch_size=many", "whole number"]),
        (["--opt_level=O7"], ["--opt_level=O7", "O0", "O1"]),
        (["--data_path="], ["--data_path=", "empty"]),
        (["--data_path=/nonexistent/folder"], ["--data_path=/nonexistent/folder"]),
        (["--resume=/nonexistent/nope.pth"], ["--resume=/nonexistent/nope.pth", "no such file"]),
        (["--pretrained=/nonexistent/nope.pth"], ["--pretrained=/nonexistent/nope.pth", "no such file"]),
        (["--gpu=0"], ["--gpu=0"]),
        (["--gpu=-1"], ["--gpu=-1"]),
        (["--gpu=abc"], ["--gpu=abc"]),
        (["--gpu=999"], ["--gpu=999"]),
        (["--device=npu"], ["--device=npu"]),
        (["--dist_backend=nccl", "--device=cpu"], ["--dist_backend=nccl", "gloo"]),
        (["--num_classes=3"], ["--num_classes=3", "10 classes"]),
        (["--batch_size=2000"], ["--batch_size=2000", "1437"]),
        (["--mixup=-1"], ["--mixup=-1", ">=0"]),
        (["--half_type=float16"], ["--half_type=float16", "O0 computes in float32"]),
        (["--opt_level=O1", "--keep_batchnorm_fp32"], ["--keep_batchnorm_fp32", "belongs to O2 and O3"]),
        (["--opt_level=O2", "--loss_scale=0.5"], ["--loss_scale=0.5", "from 1 to"]),
        (["--opt_level=O2", "--amp_engine=apex", "--device=cpu"], ["--amp_engine=apex", "--amp_engine=torch"]),
        (["--fine_tuning"], ["--fine_tuning", "--pretrained"]),
        (["--freeze=layer9"], ["--freeze=layer9", "layer4"]),
        (["--evaluate"], ["--evaluate", "--resume"]),
        (["--world_size=2", "--rank=2"], ["--rank=2", "numbered from 0"]),
    ],
    ids=lambda value: value[0] if value and value[0].startswith(("-", "f")) else "",
)
def test_wrong_request(refuse, arguments, expected):
    if torch.cuda.is_available() and arguments[0].startswith("--gpu"):
        pytest.skip("this machine has cards")
    line = refuse(*arguments)
    for part in expected:
        assert part in line


def test_wrong_pictures_folder(refuse, pictures, tmp_path):
    assert "train/" in refuse(f"--data_path={pictures}/train")
    assert "--data_path" in refuse(f"--data_path={pictures.parent}")
    file = tmp_path / "file.txt"
    file.write_text("text")
    assert str(file) in refuse(f"--data_path={file}")


def test_flat_validation_folder(refuse, pictures, tmp_path):
    flat = tmp_path / "flat"
    shutil.copytree(pictures / "train", flat / "train")
    (flat / "val").mkdir()
    for number, picture in enumerate((pictures / "val").glob("*/*.JPEG")):
        shutil.copy(picture, flat / "val" / f"{number}.JPEG")
    line = refuse(f"--data_path={flat}")
    assert "val/ has 10 images but no class folders" in line


def test_port_in_use(refuse, monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert f"port {port} is in use" in refuse("--nproc_per_node=2", "--device=cpu")


def test_weights_only_file_is_no_checkpoint(refuse, constant_weights, pictures):
    line = refuse(f"--data_path={pictures}", f"--resume={constant_weights}")
    assert "--pretrained" in line


def test_broken_checkpoints(refuse, constant_weights, tmp_path):
    cut, empty = tmp_path / "cut.pth", tmp_path / "empty.pth"
    cut.write_bytes(constant_weights.read_bytes()[:-2000])
    empty.touch()
    for path in (cut, empty, tmp_path):
        assert f"--pretrained={path}" in refuse(f"--pretrained={path}")


def test_missing_weight_is_named(capsys, constant_weights, pictures, tmp_path):
    weights = torch.load(constant_weights)
    del weights["layer2.0.downsample.1.weight"]
    path = tmp_path / "less.pth"
    torch.save(weights, path)
    flags = ["--arch=resnet18", "--width_multiplier=0.125", "--device=cpu", f"--output_dir={tmp_path / 'out'}"]
    assert main([f"--data_path={pictures}", f"--pretrained={path}", "--evaluate", *flags]) == 2
    assert "layer2.0.downsample.1.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_ends_with_zero(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--data_path" in capsys.readouterr().out


def test_print_config_trains_nothing(capsys, tmp_path):
    assert main(["--print_config", "--device=cpu", f"--output_dir={tmp_path / 'out'}"]) == 0
    assert "data_path: digits" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
