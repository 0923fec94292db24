"""--resume on the command line: what comes from the checkpoint, and what does not."""

import dataclasses

import pytest
import torch

from image_classification.checkpoint import KEYS
from image_classification.cli import parse
from image_classification.config import PrecisionConfig, TrainConfig, to_plain


@pytest.fixture
def saved_run(tmp_path):
    """The checkpoint of a run with its own settings, as far as the command line reads it."""
    config = TrainConfig()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, data_path="synthetic", batch_size=7, workers=3),
        schedule=dataclasses.replace(config.schedule, epochs=11, milestones=(4, 9)),
        distributed=dataclasses.replace(config.distributed, device="cpu", nproc_per_node=4),
        run=dataclasses.replace(config.run, seed=5, recipe="performance", output_dir="/elsewhere", evaluate=True),
    )
    path = tmp_path / "checkpoint_last.pth.tar"
    torch.save(dict.fromkeys(KEYS) | {"config": to_plain(config)}, path)
    return path


def test_resume_takes_the_saved_configuration(saved_run, values):
    resumed = values(f"--resume={saved_run}")
    assert (resumed["batch_size"], resumed["epochs"], resumed["milestones"]) == (7, 11, (4, 9))
    assert (resumed["data_path"], resumed["seed"], resumed["recipe"]) == ("synthetic", 5, "performance")
    assert resumed["resume"] == str(saved_run)


def test_resume_takes_nothing_that_belongs_to_the_machine_or_the_command(saved_run, values):
    resumed = values(f"--resume={saved_run}")
    assert (resumed["workers"], resumed["nproc_per_node"], resumed["device"]) == (None, None, "auto")
    assert (resumed["output_dir"], resumed["evaluate"]) == (None, False)


def test_the_command_line_wins_over_the_saved_configuration(saved_run, values):
    resumed = values("--epochs=12", f"--resume={saved_run}", "--data_path=digits")
    assert (resumed["epochs"], resumed["data_path"], resumed["batch_size"]) == (12, "digits", 7)


@pytest.fixture
def saved_o2_run(saved_run):
    """The same at O2 with every option of the level given."""
    contents = torch.load(saved_run)
    contents["config"]["precision"] = dataclasses.asdict(
        PrecisionConfig(opt_level="O2", half_type="float16", loss_scale="128", keep_batchnorm_fp32=False,
                        master_weights=True, amp_engine="apex", channels_last=False)
    )  # fmt: skip
    torch.save(contents, saved_run)
    return saved_run


def precision_of(*argv):
    return parse(list(argv))[0].precision


@pytest.mark.parametrize("argv", [[], ["--opt_level=O2"], ["--amp"]])
def test_resume_on_the_same_level_keeps_its_options_but_not_the_engine(saved_o2_run, argv):
    """Which engine is there belongs to the machine."""
    assert precision_of(f"--resume={saved_o2_run}", *argv) == PrecisionConfig(
        opt_level="O2", half_type="float16", loss_scale="128", keep_batchnorm_fp32=False, master_weights=True,
        amp_engine="auto", channels_last=False,
    )  # fmt: skip


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "auto"])
def test_resume_on_another_level_drops_the_options_of_the_saved_one(saved_o2_run, level):
    resumed = precision_of(f"--resume={saved_o2_run}", f"--opt_level={level}")
    assert resumed == PrecisionConfig(opt_level=level, channels_last=False)


def test_resume_takes_options_of_the_level_from_the_command_line(saved_o2_run):
    resumed = precision_of(f"--resume={saved_o2_run}", "--static_loss_scale=64", "--keep_batchnorm_fp32")
    assert (resumed.opt_level, resumed.loss_scale, resumed.keep_batchnorm_fp32) == ("O2", "64", True)
    resumed = precision_of(f"--resume={saved_o2_run}", "--opt_level=O1", "--loss_scale=8", "--amp_engine=torch")
    assert resumed == PrecisionConfig(opt_level="O1", loss_scale="8", amp_engine="torch", channels_last=False)


def test_resume_of_a_file_from_before_an_option_takes_its_default(saved_run, values):
    contents = torch.load(saved_run)
    for section, name in (("precision", "amp_engine"), ("optim", "ema_decay"), ("model", "freeze")):
        del contents["config"][section][name]
    torch.save(contents, saved_run)
    resumed = values(f"--resume={saved_run}")
    assert (resumed["amp_engine"], resumed["ema_decay"], resumed["freeze"]) == ("auto", None, ())
    assert resumed["batch_size"] == 7


def test_resume_of_a_fine_tuning_run_needs_no_other_weights(saved_run, values):
    contents = torch.load(saved_run)
    contents["config"]["model"]["fine_tuning"] = True
    torch.save(contents, saved_run)
    assert values(f"--resume={saved_run}")["fine_tuning"] is True


def test_resume_of_another_version_is_refused(saved_run, refused):
    contents = torch.load(saved_run)
    contents["config"]["optim"]["unheard_of"] = 1
    torch.save(contents, saved_run)
    assert "another version" in refused(f"--resume={saved_run}").problem


@pytest.mark.parametrize(
    "spoil", [lambda c: c | {"config": 3}, lambda c: c | {"config": {"model": 3}}, lambda c: c | {"config": {}}]
)
def test_resume_of_a_file_whose_configuration_is_none_is_refused(saved_run, spoil, refused):
    torch.save(spoil(torch.load(saved_run)), saved_run)
    assert refused(f"--resume={saved_run}").subject == f"--resume={saved_run}"
