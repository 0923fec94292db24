"""Pictures that cannot be read: the run stops and names them, or goes on without them and lists them."""

import json
import shutil

import pytest

from image_classification.launch import main

TINY = (
    "--arch=resnet18",
    "--width_multiplier=0.125",
    "--device=cpu",
    "--workers=1",
    "--resident=off",
    "--batch_size=4",
)


@pytest.fixture
def broken(pictures, tmp_path):
    """The pictures with two of training and one of validation cut in half."""
    root = shutil.copytree(pictures, tmp_path / "broken")
    for name in ("train/n01440764/n01440764_3", "train/n02102040/n02102040_0", "val/n01443537/n01443537_1"):
        path = root / f"{name}.JPEG"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return root


def test_the_run_stops_and_names_the_picture(run, broken, tmp_path):
    program = run(f"--data_path={broken}", *TINY, "--nproc_per_node=2", "--epochs=1", f"--output_dir={tmp_path}/out")
    assert program.status == 1
    last = program.err.read_text().splitlines()[-1]
    assert f"cannot read image {broken}/train/" in last and "train): truncated" in last
    program.wait_until_gone(10)


@pytest.mark.parametrize("options", [("--device=cpu",), ("--simulate_npu", "--device=npu")], ids=["cpu", "npu"])
def test_the_run_goes_on_without_them(run, broken, tmp_path, options):
    program = run(f"--data_path={broken}", *TINY, *options, "--on-bad-image=skip", "--nproc_per_node=2", "--epochs=2",
                  f"--output_dir={tmp_path}/out")  # fmt: skip
    assert program.status == 0, program.err.read_text()
    (folder,) = tmp_path.glob("out/*/*")
    lines = (folder / "bad_files.txt").read_text().splitlines()
    names = ("train/n01440764/n01440764_3", "train/n02102040/n02102040_0", "val/n01443537/n01443537_1")
    assert lines == [f"{broken}/{name}.JPEG\ttruncated" for name in names]
    out = program.out.read_text()
    assert "on 9 images, 1 cannot be read" in out
    assert f"images that cannot be read and were skipped: 3, see {folder}/bad_files.txt" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["skipped_images"], summary["steps_done"]) == ("done", 3, 6)


@pytest.mark.parametrize("is_broken, status", [(True, 2), (False, 0)])
def test_check_data(capsys, pictures, broken, is_broken, status, tmp_path):
    root = broken if is_broken else pictures
    assert main([f"--data_path={root}", "--check-data", "--workers=1", f"--output_dir={tmp_path}/out"]) == status
    captured = capsys.readouterr()
    assert captured.out.count("cannot read image") == (3 if is_broken else 0)
    assert f"checked 24 train images: {2 if is_broken else 0} cannot be read" in captured.out
    if is_broken:
        (line,) = captured.err.splitlines()
        assert line.startswith(f"error: --data_path={root}: images that cannot be read: 3 of 34; ")
    assert not (tmp_path / "out").exists()
