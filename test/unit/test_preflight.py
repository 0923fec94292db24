"""What is refused before any rank is started; cards are pretended."""

import dataclasses

import pytest
import torch

from image_classification import placement, precision, preflight
from image_classification.checkpoint import KEYS
from image_classification.config import DataConfig, TrainConfig, resolve, to_plain
from image_classification.data import DataLayout
from image_classification.preflight import new_head, prepare_job
from image_classification.resnet import build_resnet
from mmcls.utils import device
from mmcls.utils.errors import RequestError

SECTIONS = {
    item.name: section.name
    for section in dataclasses.fields(TrainConfig)
    for item in dataclasses.fields(section.default_factory)
}
DIGITS = DataLayout("digits", None, "digits", 16, 10, True)
SYNTHETIC = DataLayout("synthetic", None, "synthetic", 224, 1000, False)


def configured(**options):
    config = TrainConfig()
    for name, value in options.items():
        section = getattr(config, SECTIONS[name])
        config = dataclasses.replace(config, **{SECTIONS[name]: dataclasses.replace(section, **{name: value})})
    return config


def job_of(layout=DIGITS, **options):
    return prepare_job(configured(**options), layout, started_at=0.0)


def refused(layout=DIGITS, **options):
    with pytest.raises(RequestError) as caught:
        job_of(layout, **options)
    assert caught.value.remedy
    return caught.value


@pytest.fixture(autouse=True)
def no_apex(monkeypatch):
    """test_preflight_precision.py is about Apex."""
    monkeypatch.setattr(precision, "apex_problem", lambda: "apex is not installed")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Pretends a machine with cards of a type; none unless called, whatever this machine has."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", device.CUDA_MASK, device.NPU_MASK):
        monkeypatch.delenv(name, raising=False)

    def pretend(device_type="cpu", cards=0):
        def count(asked):
            return cards if asked == device_type else 0

        monkeypatch.setattr(placement, "device_count", count)
        monkeypatch.setattr(device, "device_count", count)
        monkeypatch.setattr(placement, "auto_select_device", lambda: device_type)
        monkeypatch.setattr(placement, "npu_distributed_data_parallel", lambda: None)

    pretend()
    return pretend


def test_without_an_accelerator_ranks_run_on_the_cpu_and_one_line_says_so():
    job = job_of(nproc_per_node=8)
    assert (job.config.distributed.device, job.cards, job.num_ranks) == ("cpu", (), 8)
    assert [note for note in job.notes if "no accelerator" in note] == ["no accelerator: 8 ranks on the CPU"]


def test_a_cpu_that_was_asked_for_needs_no_line():
    assert not [note for note in job_of(device="cpu").notes if "no accelerator" in note]


@pytest.mark.parametrize("gpu", ["0", "-1", "abc", "999", "0,1"])
def test_a_card_is_an_error_where_there_is_none(gpu):
    assert refused(gpu=gpu).subject == f"--gpu={gpu}"
    assert refused(gpu=gpu, device="cpu").subject == f"--gpu={gpu}"


def test_one_rank_per_card_needs_cards():
    assert "multiprocessing" in refused(multiprocessing_distributed=True).subject


def test_a_device_that_is_not_there_is_never_replaced_by_the_cpu():
    assert refused(device="npu").subject == "--device=npu"
    assert refused(device="cuda").subject == "--device=cuda"


@pytest.mark.parametrize(
    ("options", "cards"),
    [
        ({}, (0,)),
        ({"gpu": "3"}, (3,)),
        ({"gpu": "0,1,2"}, (0, 1, 2)),
        ({"gpu": "2, 0"}, (2, 0)),
        ({"nproc_per_node": 4}, (0, 1, 2, 3)),
        ({"nproc_per_node": 8, "gpu": "3"}, (3,)),
        ({"multiprocessing_distributed": True}, (0, 1, 2, 3)),
    ],
)
def test_the_cards_of_the_ranks(machine, options, cards):
    machine("cuda", 4)
    job = job_of(**options)
    assert (job.config.distributed.device, job.cards, job.num_ranks) == ("cuda", cards, len(cards))


def test_more_cards_than_there_are_names_both_numbers(machine, monkeypatch):
    machine("npu", 2)
    monkeypatch.setenv(device.NPU_MASK, "4,5")
    error = refused(nproc_per_node=8)
    assert error.subject == "--nproc_per_node=8"
    assert "8 devices asked" in error.problem and "2 npu visible (ASCEND_RT_VISIBLE_DEVICES=4,5)" in error.problem
    assert "--gpu" in error.remedy and "--device=cpu" in error.remedy


@pytest.mark.parametrize("gpu", ["2", "0,2", "999", "0,1,2"])
def test_a_card_beyond_those_that_are_there(machine, gpu):
    machine("cuda", 2)
    error = refused(gpu=gpu)
    assert error.subject == f"--gpu={gpu}"
    assert "2 cuda visible" in error.problem


@pytest.mark.parametrize("gpu", ["-1", "abc", "0,", "0,,1", "1.0", "0,0", "0,00", "0-3", "all"])
def test_what_is_no_list_of_cards(machine, gpu):
    machine("cuda", 4)
    assert refused(gpu=gpu).subject == f"--gpu={gpu}"


def test_under_torchrun_every_local_rank_has_a_card(machine, monkeypatch):
    """The worker takes `cards[LOCAL_RANK]`."""
    machine("cuda", 8)
    for name, value in {"RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    job = job_of()
    assert job.cards[5] == 5
    assert "global batch 128 = 8 ranks x 16 x 1 accumulation" in job.notes


def test_a_world_size_without_rank_is_not_torchrun(monkeypatch):
    """Schedulers set WORLD_SIZE; only together with RANK does it make this process a rank."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "global batch 32 = 2 ranks x 16 x 1 accumulation" in job_of(nproc_per_node=2).notes


def test_machines_multiply_the_ranks():
    job = job_of(nproc_per_node=2, world_size=3, rank=1)
    assert job.num_ranks == 2
    assert "global batch 96 = 6 ranks x 16 x 1 accumulation" in job.notes


@pytest.mark.parametrize(
    ("device_type", "backend", "fits"),
    [
        ("cpu", "gloo", True), ("cpu", "nccl", False), ("cpu", "hccl", False),
        ("cuda", "nccl", True), ("cuda", "gloo", True), ("cuda", "hccl", False),
        ("npu", "hccl", True), ("npu", "nccl", False), ("npu", "gloo", False),
    ],
)  # fmt: skip
def test_the_backend_must_fit_the_device(machine, device_type, backend, fits):
    machine(device_type, 1)
    if fits:
        assert job_of(dist_backend=backend).config.distributed.dist_backend == backend
    else:
        assert refused(dist_backend=backend).subject == f"--dist_backend={backend}"


def test_several_npus_need_a_working_mmcv(machine, monkeypatch):
    machine("npu", 2)

    def missing():
        raise RequestError("mmcv", "needs mmcv 1.x", "install it")

    monkeypatch.setattr(placement, "npu_distributed_data_parallel", missing)
    assert refused(nproc_per_node=2).subject == "mmcv"
    assert job_of().num_ranks == 1


def test_every_default_is_filled_in():
    config = job_of().config
    assert (config.model.num_classes, config.model.stem, config.data.image_size) == (10, "cifar", 16)
    assert (config.precision.opt_level, config.precision.amp_engine) == ("O0", "torch")
    assert config.data.workers == 0, "an array needs no loader processes"
    assert prepare_job(config, DIGITS, 0.0).config == config


@pytest.mark.parametrize(("size", "stem"), [(8, "cifar"), (64, "cifar"), (65, "imagenet"), (224, "imagenet")])
def test_the_stem_follows_the_size_and_is_printed(size, stem):
    job = job_of(SYNTHETIC, image_size=size, batch_size=2, synthetic_images=8)
    assert job.config.model.stem == stem
    assert f"resnet50, 1000 classes, {size} pixels, {stem} stem" in job.notes


def test_a_stem_that_was_asked_for_stays():
    assert job_of(stem="imagenet").config.model.stem == "imagenet"


def test_fewer_outputs_than_classes():
    error = refused(num_classes=2)
    assert str(error).startswith("--num_classes=2: dataset has 10 classes but --num_classes is 2")


def test_more_outputs_than_classes_are_allowed_and_warned_of():
    job = job_of(num_classes=1000)
    assert job.config.model.num_classes == 1000
    assert [note for note in job.notes if note.startswith("warning") and "1000" in note]
    assert not [note for note in job_of(num_classes=10).notes if note.startswith("warning")]


@pytest.mark.parametrize(
    ("stem", "size", "fine"),
    [("imagenet", 32, False), ("imagenet", 33, True), ("cifar", 8, False), ("cifar", 16, True)],
)
def test_one_image_must_leave_the_norms_more_than_one_value(stem, size, fine):
    options = {"stem": stem, "image_size": size, "batch_size": 1, "synthetic_images": 4}
    network = build_resnet("resnet18", 10, stem=stem, width_multiplier=0.125)
    if fine:
        assert job_of(SYNTHETIC, **options)
        network(torch.zeros(1, 3, size, size))
    else:
        assert refused(SYNTHETIC, **options).subject == "--batch_size=1"
        with pytest.raises(ValueError, match="more than 1 value"):
            network(torch.zeros(1, 3, size, size))


def test_more_ranks_than_images():
    error = refused(nproc_per_node=8, batch_size=200)
    assert error.subject == "--batch_size=200"
    assert "1600" in error.problem


@pytest.mark.parametrize(
    ("asked", "num_ranks", "used"), [(None, 1, 8), (None, 4, 3), (2, 4, 2), (128, 4, 3), (0, 1, 0), (None, 13, 0)]
)
def test_workers_share_the_cores_among_the_ranks(monkeypatch, asked, num_ranks, used):
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda _: set(range(12)))
    layout = dataclasses.replace(DIGITS, kind="folder")
    config, notes = preflight._complete_data(TrainConfig(data=DataConfig(workers=asked)), layout, num_ranks, num_ranks)
    assert config.data.workers == used
    assert notes == [
        f"loader workers: {used} per rank ({8 if asked is None else asked} asked, 12 cores for {num_ranks} ranks)"
    ]


def test_synthetic_images_fill_a_hundred_global_batches():
    job = job_of(SYNTHETIC, image_size=8, batch_size=4, nproc_per_node=2)
    assert (job.plan.num_train_images, job.plan.steps_per_epoch) == (800, 100)
    assert job_of(SYNTHETIC, image_size=8, batch_size=4, synthetic_images=8).plan.num_train_images == 8


def test_the_learning_rate_and_its_source_are_printed():
    assert "learning rate 0.00625 (0.1 per 256 images)" in job_of().notes
    assert "learning rate 0.3 (--lr)" in job_of(lr=0.3).notes


def test_a_file_of_weights_is_read_at_once(tmp_path):
    assert refused(pretrained=str(tmp_path / "none.pth")).problem == "no such file"


def test_parts_to_freeze_are_checked_before_any_rank_is_started():
    assert job_of(freeze=("conv1", "bn1", "layer1")).config.model.freeze == ("conv1", "bn1", "layer1")
    error = refused(freeze=("conv1", "layer9"))
    assert error.subject == "--freeze=layer9"
    assert "layer4" in error.remedy
    everything = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc")
    assert "nothing to train" in refused(freeze=everything).problem


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, "if needed"),
        ({"fine_tuning": True}, "always"),
        ({"evaluate": True}, "never"),
        ({"evaluate": True, "fine_tuning": True}, "never"),
    ],
)
def test_when_the_last_layer_is_a_new_one(options, answer):
    assert new_head(configured(**options)) == answer


def test_fine_tuning_needs_weights_of_all_but_the_last_layer(tmp_path):
    path = str(tmp_path / "weights.pth")
    network = build_resnet("resnet18", 1000, stem="cifar", width_multiplier=0.125)
    weights = {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}
    options = {"arch": "resnet18", "width_multiplier": 0.125, "pretrained": path}
    torch.save(weights, path)
    assert job_of(fine_tuning=True, **options)
    assert "missing fc.bias" in refused(**options).problem
    torch.save(network.state_dict(), path)
    assert job_of(fine_tuning=True, **options) and job_of(**options)
    assert "fc." in refused(evaluate=True, **options).problem
    del weights["conv1.weight"]
    torch.save(weights, path)
    assert "missing conv1.weight" in refused(fine_tuning=True, **options).problem


def test_a_place_where_nothing_can_be_written_is_a_wrong_request(tmp_path):
    (tmp_path / "file").touch()
    assert "--output_dir" in refused(output_dir=str(tmp_path / "file")).subject


def saved(tmp_path, num_classes=10, step=0, **options):
    config = job_of(**options).config
    path = tmp_path / "checkpoint.pth.tar"
    plan = to_plain(resolve(config, 1, 1437, 360))
    network = build_resnet(config.model.arch, 10, stem="cifar", width_multiplier=config.model.width_multiplier)
    contents = {"config": to_plain(config), "plan": plan, "num_classes": num_classes, "model": network.state_dict()}
    contents["step"] = step
    torch.save(dict.fromkeys(KEYS) | contents, path)
    return str(path)


def test_resuming_with_another_number_of_classes(tmp_path):
    path = saved(tmp_path, num_classes=1000)
    error = refused(resume=path)
    assert error.subject == f"--resume={path}"
    assert error.problem == "checkpoint has 1000 classes, data has 10"
    assert "--pretrained" in error.remedy


def test_a_checkpoint_of_another_network_is_refused_before_ranks_are_started(tmp_path):
    path = saved(tmp_path, arch="resnet18", width_multiplier=0.125)
    error = refused(resume=path, arch="resnet34", width_multiplier=0.125)
    assert error.subject == f"--resume={path}"
    assert "missing layer1.2" in error.problem


def test_a_finished_run_is_not_continued(tmp_path):
    path = saved(tmp_path, step=89 * 90)
    assert refused(resume=path).problem == "has done its 8010 steps"
    assert job_of(resume=path, epochs=91).plan.total_steps == 89 * 91


def test_what_is_not_as_it_was_is_said_a_line_each(tmp_path):
    path = saved(tmp_path)
    job = job_of(resume=path, epochs=3, batch_size=8, nproc_per_node=4)
    differences = {note.rpartition(": ")[2] for note in job.notes if note.startswith("not as in the run")}
    assert differences == {
        "epochs was 90, is 3",
        "batch_size was 16, is 8",
        "world_size was 1, is 4",
        "global_batch_size was 16, is 32",
        "peak_lr was 0.00625, is 0.0125",
    }


def test_techniques_that_are_not_as_they_were_are_said_too(tmp_path):
    path = saved(tmp_path)
    job = job_of(resume=path, mixup=0.2, ema_decay=0.9, opt_level="O1")
    differences = {note.rpartition(": ")[2] for note in job.notes if note.startswith("not as in the run")}
    assert differences == {
        "mixup was 0.0, is 0.2",
        "ema_decay was None, is 0.9",
        "opt_level was O0, is O1",
        "half_type was None, is bfloat16",
    }


@pytest.mark.parametrize("options", [{"freeze": ("conv1",)}, {"fine_tuning": True}, {"optimizer": "lars"}], ids=str)
def test_what_an_optimizers_state_consists_of_must_stay(tmp_path, options):
    with pytest.raises(RequestError, match=f"{next(iter(options))} was .* the optimizer's state does not fit"):
        job_of(resume=saved(tmp_path), **options)


def test_an_unchanged_run_is_resumed_without_remarks(tmp_path):
    assert not [note for note in job_of(resume=saved(tmp_path)).notes if note.startswith("not as in the run")]


def test_shared_memory_is_looked_at_before_any_rank_is_started(monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "check_loaders", lambda *arguments: asked.append(arguments) or ("warning: tight",))
    job = job_of(nproc_per_node=2)
    assert "warning: tight" in job.notes
    ((dataset, config, num_ranks),) = asked
    assert (len(dataset), config, num_ranks) == (1437, job.config.data, 2)
