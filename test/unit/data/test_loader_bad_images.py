"""Pictures that cannot be decoded, on their way through the loaders."""

from dataclasses import replace

import pytest
import torch

from image_classification.config import DataConfig
from image_classification.data import EvalLoader, TrainLoader, detect_layout, open_datasets

CPU = torch.device("cpu")


@pytest.fixture(params=["read anew", "resident"])
def skipping(request, tmp_path, make):
    """24 + 10 pictures of which 3 + 4 cannot be read, and the options to skip them."""
    make.folder(tmp_path)
    for name in ("train/ant/ant_1", "train/bee/bee_7", "train/cow/cow_0"):
        (tmp_path / f"{name}.JPEG").write_bytes(b"")
    # With batches of 2, one batch of validation has none left.
    for name in ("val/ant/ant_0", "val/ant/ant_1", "val/bee/bee_2", "val/cow/cow_2"):
        (tmp_path / f"{name}.JPEG").write_bytes(b"text")
    resident = "device" if request.param == "resident" else "off"
    config = DataConfig(data_path=str(tmp_path), on_bad_image="skip", workers=0, resident=resident)
    return open_datasets(detect_layout(config.data_path), config, 16), config


def train_loader(data, config, rank=0, ranks=1):
    return TrainLoader(
        data.train,
        config,
        micro_batch_size=6 // ranks,
        micro_batches_per_epoch=4,
        rank=rank,
        world_size=ranks,
        seed=0,
        device=CPU,
        memory_format=torch.channels_last,
    )


def eval_loader(data, config, rank=0, ranks=1):
    return EvalLoader(
        data.val,
        config,
        batch_size=2,
        rank=rank,
        world_size=ranks,
        device=CPU,
        memory_format=torch.contiguous_format,
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_training_batches_stay_full_and_bad_pictures_are_listed_once(skipping, workers):
    data, config = skipping
    loader = train_loader(data, replace(config, workers=workers))
    epochs = [list(loader.epoch(epoch)) for epoch in (0, 1, 0)]
    assert all([len(labels) for _, labels in batches] == [6, 6, 6, 6] for batches in epochs)
    for one, again in zip(epochs[0], epochs[2], strict=True):
        assert torch.equal(one[0], again[0]) and torch.equal(one[1], again[1])
    names = sorted(error.path.rpartition("/")[2] for error in loader.bad_images)
    assert names == ["ant_1.JPEG", "bee_7.JPEG", "cow_0.JPEG"]
    assert {error.reason for error in loader.bad_images} == {"empty file"}
    loader.close()


def test_training_batches_are_the_same_for_any_number_of_ranks(skipping):
    data, config = skipping
    whole = list(train_loader(data, config).epoch(1))
    parts = [list(train_loader(data, config, rank, 2).epoch(1)) for rank in range(2)]
    for (images, labels), *halves in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([half[0] for half in halves]), images)
        assert torch.equal(torch.cat([half[1] for half in halves]), labels)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_validation_leaves_them_out_and_says_how_many(skipping, workers, ranks):
    data, config = skipping
    for _ in range(2):
        seen, left_out, names = [], 0, []
        for rank in range(ranks):
            loader = eval_loader(data, replace(config, workers=workers), rank, ranks)
            for _ in range(2):
                labels = [label for _, batch in loader for label in batch.tolist()]
                assert loader.num_left_out + len(labels) == len(range(rank, 10, ranks))
            seen += labels
            left_out += loader.num_left_out
            names += [error.path.rpartition("/")[2] for error in loader.bad_images]
            loader.close()
        assert sorted(seen) == [0, 0, 1, 1, 2, 2] and left_out == 4
        assert sorted(names) == ["ant_0.JPEG", "ant_1.JPEG", "bee_2.JPEG", "cow_2.JPEG"]


def test_a_whole_data_set_leaves_nothing_out(tmp_path, make):
    config = DataConfig(data_path=str(make.folder(tmp_path)), on_bad_image="skip", workers=0, resident="off")
    data = open_datasets(detect_layout(config.data_path), config, 16)
    loaders = train_loader(data, config), eval_loader(data, config)
    list(loaders[0].epoch(0))
    assert sum(len(labels) for _, labels in loaders[1]) == 10
    assert loaders[1].num_left_out == 0 and [loader.bad_images for loader in loaders] == [[], []]
