"""The command line: spellings, names, precedence, and one line for each wrong request."""

import dataclasses
import typing

import pytest

from image_classification.cli import LIMITS, parse
from image_classification.config import TrainConfig
from mmcls.utils.errors import RequestError


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
def test_names_that_users_know(names, values):
    parsed = values(*(word for option in names for word in option.split()), "--schedule=step")
    assert {name: parsed[name] for name, _ in names.values()} == dict(names.values())


@pytest.mark.parametrize(
    ("argv", "subject"),
    [
        (["--milestones=3"], "--milestones"),
        (["--gamma=0.5", "--schedule=linear"], "--gamma"),
        (["--power=3", "--schedule=linear"], "--power"),
        (["--dynamic_loss_scale=False"], "--dynamic_loss_scale=False"),
        (["--mixup=0.2", "--batch_size=1"], "--batch_size=1"),
    ],
)
def test_what_would_change_nothing_is_refused(argv, subject, values):
    with pytest.raises(RequestError) as caught:
        values(*argv)
    assert caught.value.subject == subject


def test_addr_takes_the_port_of_the_environment(monkeypatch, values):
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
def test_a_flag_with_and_without_value(argv, value, values):
    assert values("--pretrained=weights.pth", *argv)["evaluate"] is value


def test_a_flag_does_not_swallow_the_next_option(values):
    assert values("--pretrained=w.pth", "-e", "--epochs", "3")["epochs"] == 3


def test_the_help_is_printed_and_names_every_option(capsys, values):
    with pytest.raises(SystemExit) as caught:
        parse(["--epochs=3", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in values())


def test_what_the_help_lists_is_taken(capsys, values):
    with pytest.raises(SystemExit):
        parse(["--help"])
    words = (word.strip(",") for word in capsys.readouterr().out.split())
    listed = {word for word in words if word.startswith("--no_") and word != "--no_augment_epochs"}
    assert "--no_nesterov" in listed
    assert all(values(option) for option in listed)


def test_the_later_of_two_flags_wins(values):
    assert values("--batch_size=4", "-b", "8", "--batch-size=6")["batch_size"] == 6
    assert values("--recipe=full", "--recipe=performance")["epochs"] == values("--recipe=performance")["epochs"]
    assert values("--data_path=/nonexistent", "--data=digits")["data_path"] == "digits"


def test_precedence_default_recipe_command_line(values):
    assert TrainConfig().schedule.epochs == 90
    assert values("--data_path=digits")["epochs"] == 16
    assert values("--data_path=digits", "--recipe=performance")["epochs"] == 2
    chosen = values("--data_path=digits", "--recipe=performance", "--epochs=5")
    assert chosen["epochs"] == 5
    assert (chosen["opt_level"], chosen["recipe"]) == ("auto", "performance")
    assert values("--data_path=synthetic")["label_smoothing"] == 0.1
    # A value that equals the default of the field is still the user's.
    assert values("--data_path=digits", "--epochs=90")["epochs"] == 90


@pytest.mark.parametrize(
    ("argv", "subject", "nearest"),
    [
        (["--epoch=3"], "--epoch", "--epochs"),
        (["--data_pathx=digits"], "--data_pathx", "--data_path"),
        (["--data_pat", "digits"], "--data_pat", "--data_path"),
        (["--learnin-rate=1"], "--learnin-rate", "--learning_rate"),
        (["--batchsize=1"], "--batchsize", "--batch_size"),
        (["--statc_loss_scale=8"], "--statc_loss_scale", "--static_loss_scale"),
        (["--no_mixup"], "--no_mixup", "--mixup"),
        (["-x"], "-x", "--"),
    ],
)
def test_an_unknown_option_names_the_nearest(argv, subject, nearest, refused):
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
        (["--schedule=poly"], "--schedule=poly", "polynomial"),
        (["--dist-backend=mpi"], "--dist_backend=mpi", "hccl, nccl, gloo"),
        (["--evaluate=maybe"], "--evaluate=maybe", "True or False"),
        (["--amp=maybe"], "--amp=maybe", "True or False"),
        (["--dynamic_loss_scale=128"], "--dynamic_loss_scale=128", "True or False"),
        (["--static-loss-scale"], "--static-loss-scale", "--static-loss-scale=VALUE"),
        (["--keep_batchnorm_fp32=yes"], "--keep_batchnorm_fp32=yes", "True or False"),
        (["--opt_level=O4"], "--opt_level=O4", "O0, O1, O2, O3"),
        (["--half_type=half"], "--half_type=half", "float16, bfloat16"),
        (["--amp_engine=nvidia"], "--amp_engine=nvidia", "auto, apex, torch"),
        (["--precision_mode=fast"], "--precision_mode=fast", "must_keep_origin_dtype"),
        (["--rank=1"], "--rank=1", "its own number"),
        (["--evaluate"], "--evaluate", "--resume=PATH"),
        (["--resume=/nonexistent/x.pth"], "--resume=/nonexistent/x.pth", "check the path"),
        (["--data_path=/nonexistent"], "--data_path=/nonexistent", "digits"),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_remedy(argv, subject, remedy, refused):
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
        "--no_augment_epochs=-1",
        "--mixup=-0.2",
        "--cutmix=-1.0",
        "--clip_grad_norm=0.0",
        "--ema_decay=-0.1",
        "--power=0.0",
    ],
)
def test_numbers_have_limits(argument, refused):
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
    # Milestones have a check of their own, and any learning rate may be a threshold.
    assert numbers - LIMITS.keys() == {"milestones", "recipe_warmup_above_lr"}
    assert LIMITS.keys() <= numbers


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
        "--ema_decay=1.0",
        "--ema_decay=nan",
        "--mixup=inf",
        "--clip_grad_norm=inf",
    ],
)
def test_numbers_that_no_run_can_use(argument, refused):
    assert refused(argument).subject == argument


def test_nesterov_needs_momentum(refused):
    refused("--nesterov", "--momentum=0")


@pytest.mark.parametrize(
    ("argv", "level"),
    [
        ([], "O0"),
        (["--amp"], "O2"),
        (["--amp=True"], "O2"),
        (["--amp", "true"], "O2"),
        (["--amp=False"], "O0"),
        (["--precision_mode=allow_mix_precision"], "O2"),
        (["--precision_mode", "must_keep_origin_dtype"], "O0"),
        (["--recipe=performance"], "auto"),
        (["--recipe=performance", "--amp=False"], "O0"),
        (["--recipe=performance", "--precision_mode=must_keep_origin_dtype"], "O0"),
        (["--opt-level=O3"], "O3"),
        (["--opt_level=O1", "--amp"], "O2"),
        (["--amp", "--opt_level=O1"], "O1"),
    ],
)
def test_the_names_of_the_level(argv, level, values):
    assert values(*argv)["opt_level"] == level


@pytest.mark.parametrize(
    ("argv", "scale"),
    [
        ([], None),
        (["--loss_scale=dynamic"], "dynamic"),
        (["--loss-scale", "64"], "64"),
        (["--static_loss_scale=128"], "128"),
        (["--static-loss-scale", "1024"], "1024"),
        (["--dynamic_loss_scale"], "dynamic"),
        (["--dynamic-loss-scale=True"], "dynamic"),
        (["--static_loss_scale=128", "--dynamic_loss_scale"], "dynamic"),
        (["--dynamic_loss_scale", "--loss_scale=2"], "2"),
    ],
)
def test_the_names_of_the_loss_scale(argv, scale, values):
    assert values("--amp", *argv, "--epochs=3")["loss_scale"] == scale


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ([], None),
        (["--{}"], True),
        (["--{}=True"], True),
        (["--{}", "true"], True),
        (["--{}=False"], False),
        (["--{}", "false"], False),
        (["--no_{}"], False),
        (["--{}", "--no-{}"], False),
    ],
)
def test_options_that_are_undecided_unless_given(written, value, values):
    names = ("keep_batchnorm_fp32", "master-weights", "channels_last")
    parsed = values(*(word.format(name) for name in names for word in written), "--epochs=3")
    assert {parsed[name.replace("-", "_")] for name in names} == {value}
    assert parsed["epochs"] == 3


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--mixup=0.2", "--cutmix", "1"], {"mixup": 0.2, "cutmix": 1.0}),
        (["--freeze=conv1,layer1"], {"freeze": ("conv1", "layer1")}),
        (["--freeze", "layer2.0"], {"freeze": ("layer2.0",)}),
        (["--fine_tuning", "--pretrained=weights.pth"], {"fine_tuning": True, "freeze": ()}),
        (["--no_augment_epochs=16"], {"no_augment_epochs": 16}),
        (["--no-augment-epochs", "3"], {"no_augment_epochs": 3}),
        (["--ema_decay=0.9999", "--clip-grad-norm=5"], {"ema_decay": 0.9999, "clip_grad_norm": 5.0}),
        (["--ema_decay=0"], {"ema_decay": 0.0}),
        (["--schedule=polynomial", "--power=1"], {"schedule": "polynomial", "power": 1.0}),
        (["--optimizer=lars", "--deterministic"], {"optimizer": "lars", "deterministic": True}),
        (["--half-type=bfloat16", "--amp_engine=torch"], {"half_type": "bfloat16", "amp_engine": "torch"}),
    ],
)
def test_techniques(argv, expected, values):
    parsed = values(*argv)
    assert {name: parsed[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "subject", "text"),
    [
        (["--fine_tuning"], "--fine_tuning", "--pretrained=PATH"),
        (["--fine_tuning", "--freeze=conv1", "--pretrained=x.pth"], "--freeze", "one of them"),
        (["--no_augment_epochs=17"], "--no_augment_epochs=17", "16 epochs"),
        (["--no_augment_epochs=4", "--epochs=3"], "--no_augment_epochs=4", "3 epochs"),
    ],
)
def test_techniques_that_contradict_the_rest(argv, subject, text, refused):
    error = refused(*argv)
    assert error.subject == subject
    assert text in str(error)


def test_the_rank_option_of_old_launchers(monkeypatch, values, refused):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert values("--local_rank=3") == values("--local-rank", "3") == values()
    assert refused("--local_rank=2").subject == "--local_rank=2"
    monkeypatch.delenv("LOCAL_RANK")
    refused("--local_rank=0")


@pytest.mark.parametrize("path", ["~nobody_of_this_name/x.pth", "x" * 300])
def test_odd_paths_are_wrong_requests(path, refused):
    assert refused(f"--resume={path}").subject == f"--resume={path}"
