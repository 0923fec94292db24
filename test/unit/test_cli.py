"""The command line: spellings, names, precedence, and one line for each wrong request."""

import dataclasses
import typing

import pytest
import torch

from image_classification.checkpoint import KEYS
from image_classification.cli import LIMITS, parse
from image_classification.config import TrainConfig, to_plain
from mmcls.utils.errors import RequestError


def values(*argv):
    """Every option by its name, as parsed."""
    config, _ = parse(list(argv))
    return {
        item.name: getattr(section, item.name)
        for section in (getattr(config, field.name) for field in dataclasses.fields(config))
        for item in dataclasses.fields(section)
    }


def refused(*argv):
    with pytest.raises(RequestError) as caught:
        parse(list(argv))
    assert caught.value.exit_status == 2
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


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


@pytest.mark.parametrize(
    "argv",
    [
        ["--data_path=synthetic"],
        ["--data_path", "synthetic"],
        ["--data-path=synthetic"],
        ["--data-path", "synthetic"],
        ["--data", "synthetic"],
        ["--data=synthetic"],
    ],
)
def test_all_spellings_of_an_option(argv):
    config, layout = parse(argv)
    assert config.data.data_path == "synthetic"
    assert layout.kind == "synthetic"


LONG_NAMES = {
    "--batch_size=8": ("batch_size", 8),
    "--lr=1e-3": ("lr", 1e-3),
    "--epochs=3": ("epochs", 3),
    "--workers=2": ("workers", 2),
    "--print-freq=7": ("print_freq", 7),
    "--seed=9": ("seed", 9),
    "--momentum=0.8": ("momentum", 0.8),
    "--weight-decay=0": ("weight_decay", 0.0),
    "--warmup=2": ("warmup", 2.0),
    "--label-smoothing=0.1": ("label_smoothing", 0.1),
    "--gpu=0,1,2": ("gpu", "0,1,2"),
    "--device=cpu": ("device", "cpu"),
    "--world-size=2": ("world_size", 2),
    "--rank=1": ("rank", 1),
    "--multiprocessing-distributed": ("multiprocessing_distributed", True),
    "--dist-url=tcp://host:29501": ("dist_url", "tcp://host:29501"),
    "--dist-backend=gloo": ("dist_backend", "gloo"),
    "--opt-level=O1": ("opt_level", "O1"),
    "--milestones=1,2,3": ("milestones", (1, 2, 3)),
    "--channels_last=False": ("channels_last", False),
    "--nproc_per_node=8": ("nproc_per_node", 8),
    "--max_steps=4": ("max_steps", 4),
}
OTHER_NAMES = {
    "-b 16": ("batch_size", 16),
    "-a resnet18": ("arch", "resnet18"),
    "--learning-rate=0.5": ("lr", 0.5),
    "-j 0": ("workers", 0),
    "-p 5": ("print_freq", 5),
    "--wd 1e-3": ("weight_decay", 1e-3),
    "--warmup-epochs=0.5": ("warmup", 0.5),
    "--device-list 4,5": ("gpu", "4,5"),
    "--precision_mode=must_keep_origin_dtype": ("opt_level", "O0"),
    "--milestones 4": ("milestones", (4,)),
}


@pytest.mark.parametrize("names", [LONG_NAMES, OTHER_NAMES], ids=["long", "other"])
def test_names_that_users_know(names):
    parsed = values(*(word for option in names for word in option.split()))
    assert {name: parsed[name] for name, _ in names.values()} == dict(names.values())


def test_addr_takes_the_port_of_the_environment(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert values("--addr=10.0.0.1")["dist_url"] == "tcp://10.0.0.1:29500"
    monkeypatch.setenv("MASTER_PORT", "41000")
    assert values("--addr", "10.0.0.1")["dist_url"] == "tcp://10.0.0.1:41000"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--evaluate=True"], True),
        (["--evaluate=true"], True),
        (["--evaluate", "True"], True),
        (["--evaluate"], True),
        (["-e"], True),
        (["--evaluate=False"], False),
        (["--evaluate", "False"], False),
        (["-e", "--evaluate=false"], False),
        ([], False),
    ],
)
def test_a_flag_with_and_without_value(argv, value):
    assert values("--pretrained=weights.pth", *argv)["evaluate"] is value


def test_a_flag_does_not_swallow_the_next_option():
    assert values("--pretrained=w.pth", "-e", "--epochs", "3")["epochs"] == 3


def test_the_help_is_printed_and_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--epochs=3", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in values())


def test_what_the_help_lists_is_taken(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    listed = {word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--no_")}
    assert all(values(option) for option in listed)


def test_the_later_of_two_flags_wins():
    assert values("--batch_size=4", "-b", "8", "--batch-size=6")["batch_size"] == 6
    assert values("--recipe=full", "--recipe=performance")["epochs"] == values("--recipe=performance")["epochs"]
    assert values("--data_path=/nonexistent", "--data=digits")["data_path"] == "digits"


def test_precedence_default_recipe_command_line():
    assert TrainConfig().schedule.epochs == 90
    assert values("--data_path=digits")["epochs"] == 16
    assert values("--data_path=digits", "--recipe=performance")["epochs"] == 2
    chosen = values("--data_path=digits", "--recipe=performance", "--epochs=5")
    assert chosen["epochs"] == 5
    assert (chosen["opt_level"], chosen["recipe"]) == ("auto", "performance")
    assert values("--data_path=synthetic")["label_smoothing"] == 0.1
    # A value that equals the default of the field is still the user's.
    assert values("--data_path=digits", "--epochs=90")["epochs"] == 90


def test_resume_takes_the_saved_configuration(saved_run):
    resumed = values(f"--resume={saved_run}")
    assert (resumed["batch_size"], resumed["epochs"], resumed["milestones"]) == (7, 11, (4, 9))
    assert (resumed["data_path"], resumed["seed"], resumed["recipe"]) == ("synthetic", 5, "performance")
    assert resumed["resume"] == str(saved_run)


def test_resume_takes_nothing_that_belongs_to_the_machine_or_the_command(saved_run):
    resumed = values(f"--resume={saved_run}")
    assert (resumed["workers"], resumed["nproc_per_node"], resumed["device"]) == (None, None, "auto")
    assert (resumed["output_dir"], resumed["evaluate"]) == (None, False)


def test_the_command_line_wins_over_the_saved_configuration(saved_run):
    resumed = values("--epochs=12", f"--resume={saved_run}", "--data_path=digits")
    assert (resumed["epochs"], resumed["data_path"], resumed["batch_size"]) == (12, "digits", 7)


def test_resume_of_another_version_is_refused(saved_run):
    contents = torch.load(saved_run)
    contents["config"]["optim"]["unheard_of"] = 1
    torch.save(contents, saved_run)
    assert "another version" in refused(f"--resume={saved_run}").problem


@pytest.mark.parametrize(
    "spoil", [lambda c: c | {"config": 3}, lambda c: c | {"config": {"model": 3}}, lambda c: c | {"config": {}}]
)
def test_resume_of_a_file_whose_configuration_is_none_is_refused(saved_run, spoil):
    torch.save(spoil(torch.load(saved_run)), saved_run)
    assert refused(f"--resume={saved_run}").subject == f"--resume={saved_run}"


@pytest.mark.parametrize(
    ("argv", "subject", "nearest"),
    [
        (["--epoch=3"], "--epoch", "--epochs"),
        (["--data_pathx=digits"], "--data_pathx", "--data_path"),
        (["--data_pat", "digits"], "--data_pat", "--data_path"),
        (["--learnin-rate=1"], "--learnin-rate", "--learning_rate"),
        (["--batchsize=1"], "--batchsize", "--batch_size"),
        (["-x"], "-x", "--"),
    ],
)
def test_an_unknown_option_names_the_nearest(argv, subject, nearest):
    error = refused(*argv)
    assert error.subject == subject
    assert error.problem == "unknown option"
    assert f"did you mean {nearest}" in error.remedy


@pytest.mark.parametrize(
    ("argv", "subject", "remedy"),
    [
        (["foo"], "foo", "--option=value"),
        (["--data_path"], "--data_path", "--data_path=VALUE"),
        (["--data_path", "--epochs=3"], "--data_path", "--data_path=VALUE"),
        (["--data_path="], "--data_path=", "give a value"),
        (["--data_path", ""], "--data_path=", "give a value"),
        (["--gpu= "], "--gpu=", "give a value"),
        (["--epochs=many"], "--epochs=many", "whole number"),
        (["--epochs=1.5"], "--epochs=1.5", "whole number"),
        (["-b", "x"], "--batch_size=x", "whole number"),
        (["--lr=fast"], "--lr=fast", "a number"),
        (["--milestones=1,b"], "--milestones=1,b", ""),
        (["--arch=resnet51"], "--arch=resnet51", "resnet50"),
        (["--schedule=poly"], "--schedule=poly", "cosine"),
        (["--dist-backend=mpi"], "--dist_backend=mpi", "hccl, nccl, gloo"),
        (["--evaluate=maybe"], "--evaluate=maybe", "True or False"),
        (["--amp=maybe"], "--amp=maybe", "True or False"),
        (["--precision_mode=fast"], "--precision_mode=fast", "must_keep_origin_dtype"),
        (["--rank=1"], "--rank=1", "its own number"),
        (["--evaluate"], "--evaluate", "--resume=PATH"),
        (["--resume=/nonexistent/x.pth"], "--resume=/nonexistent/x.pth", "check the path"),
        (["--data_path=/nonexistent"], "--data_path=/nonexistent", "digits"),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_remedy(argv, subject, remedy):
    error = refused(*argv)
    assert error.subject == subject
    assert remedy in error.remedy


@pytest.mark.parametrize(
    "argument",
    [
        "--batch_size=0",
        "--batch_size=-4",
        "--epochs=0",
        "--max_steps=0",
        "--num_classes=0",
        "--nproc_per_node=0",
        "--print_freq=0",
        "--workers=-1",
        "--lr=-0.1",
        "--momentum=-1.0",
        "--gamma=0.0",
        "--width_multiplier=0.0",
        "--seed=-1",
    ],
)
def test_numbers_have_limits(argument):
    error = refused(argument)
    assert error.subject == argument
    assert "must be" in error.problem


def test_every_number_has_a_limit():
    numbers = {
        item.name
        for field in dataclasses.fields(TrainConfig)
        for item in dataclasses.fields(field.default_factory)
        if {int, float} & {item.type, *typing.get_args(item.type)}
    }
    assert numbers - LIMITS.keys() == {"milestones", "recipe_warmup_above_lr"}


@pytest.mark.parametrize(
    "argument",
    [
        "--lr=nan",
        "--lr=inf",
        "--warmup=inf",
        "--dist_timeout=inf",
        "--width_multiplier=inf",
        "--seed=18446744073709551616",
        "--label_smoothing=1.0",
    ],
)
def test_numbers_that_no_run_can_use(argument):
    assert refused(argument).subject == argument


def test_nesterov_needs_momentum():
    refused("--nesterov", "--momentum=0")


@pytest.mark.parametrize(
    "argv",
    [["--mixup=0.2"], ["--static-loss-scale=128"], ["--dynamic-loss-scale"], ["--loss-scale", "64"]],
    ids=lambda argv: argv[0],
)
def test_a_name_whose_feature_is_not_there_is_refused(argv):
    error = refused(*argv)
    assert error.subject == argv[0].partition("=")[0]
    assert error.problem == "this version does not have it"


@pytest.mark.parametrize(
    "argv",
    [["--amp"], ["--amp=True"], ["--precision_mode=allow_mix_precision"], ["--opt_level=O2"], ["--opt_level=O3"]],
)
def test_levels_that_are_not_there_are_refused(argv):
    error = refused(*argv)
    assert error.subject.startswith(argv[0].partition("=")[0])
    assert "O1" in error.remedy


def test_amp_false_changes_nothing():
    assert values("--amp=False")["opt_level"] == "O0"


def test_the_rank_option_of_old_launchers(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert values("--local_rank=3") == values("--local-rank", "3") == values()
    assert refused("--local_rank=2").subject == "--local_rank=2"
    monkeypatch.delenv("LOCAL_RANK")
    refused("--local_rank=0")


@pytest.mark.parametrize("path", ["~nobody_of_this_name/x.pth", "x" * 300])
def test_odd_paths_are_wrong_requests(path):
    assert refused(f"--resume={path}").subject == f"--resume={path}"
