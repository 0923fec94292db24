"""The step, the epoch and `fit`, on a tiny network and batches made up here."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from image_classification import training
from image_classification.config import (
    DataConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
    resolve,
)
from image_classification.metrics import MetricSums
from image_classification.precision import make_precision
from image_classification.training import epoch_seed, fit, fix_summation_order, grouped, train_step, validate
from mmcls.utils.distribution import wrap_distributed_model
from mmcls.utils.errors import DivergenceError


def batch_of(num_images, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_images, 3, 8, 8, generator=generator)
    return images.to(device), torch.randint(0, 10, (num_images,), generator=generator).to(device)


class Batches:
    """Stands for both loaders: `per_epoch` batches that depend on epoch and position."""

    num_left_out = 0

    def __init__(self, per_epoch, num_images=4):
        self.per_epoch, self.num_images, self.augmented = per_epoch, num_images, []

    def epoch(self, epoch, first_micro_batch=0, augment=True):
        self.augmented.append(augment)
        for position in range(first_micro_batch, self.per_epoch):
            yield batch_of(self.num_images, seed=1000 * epoch + position)

    def __iter__(self):
        return self.epoch(99)


class Recorder:
    """An Observer that keeps what it was told."""

    def __init__(self):
        self.steps, self.epochs, self.pauses = [], [], 0

    def step_done(self, state, sums, data_seconds):
        self.steps.append((state.step, sums))

    def training_paused(self):
        self.pauses += 1

    def epoch_done(self, state, epoch, train, validation, ema):
        self.epochs.append((epoch, train, validation))


def plan_of(steps_per_epoch, epochs=1, max_steps=None, accumulation_steps=1):
    config = TrainConfig(
        data=DataConfig(batch_size=4),
        schedule=ScheduleConfig(epochs=epochs, max_steps=max_steps, accumulation_steps=accumulation_steps),
    )
    return resolve(config, 1, steps_per_epoch * 4 * accumulation_steps, 8)


def fit_small(state, steps_per_epoch=3, epochs=1, max_steps=None, accumulation_steps=1, **options):
    loader = Batches(steps_per_epoch * accumulation_steps)
    fit(state, loader, Batches(2), plan_of(steps_per_epoch, epochs, max_steps, accumulation_steps), **options)


def assert_same_weights(module, other):
    for (name, value), expected in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def test_the_step_equals_the_loop_that_anybody_would_write(make_state):
    optim = OptimConfig(momentum=0.9, weight_decay=1e-2, nesterov=True)
    state = make_state(label_smoothing=0.1, optim=optim, schedule=lambda step: 0.1 / (step + 1))
    twin = make_state(optim=optim)
    model, optimizer = twin.module, torch.optim.SGD(twin.optimizer.param_groups, momentum=0.9, nesterov=True)
    for step in range(4):
        images, labels = batch_of(6, seed=step)
        train_step(state, [(images, labels)])
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
    assert_same_weights(state.module, model)


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (7, 1, 5, 3)])
def test_accumulation_equals_one_batch(make_state, sizes):
    images, labels = batch_of(16)
    once, often = make_state(), make_state()
    for state in (once, often):
        state.module.eval()  # batch norms would see other batches
    sums = train_step(once, [(images, labels)])
    sums_of_parts = train_step(often, list(zip(images.split(sizes), labels.split(sizes), strict=True)))
    for parameter, expected in zip(often.module.parameters(), once.module.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(sums_of_parts.values, sums.values, rtol=0, atol=1e-4)
    assert (once.step, often.step) == (1, 1)


def test_the_learning_rate_is_set_for_every_step_and_group(make_state):
    state = make_state(schedule=lambda step: 0.5 + step)
    rates = []
    state.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append([g["lr"] for g in optimizer.param_groups])
    )
    for step in range(3):
        train_step(state, [batch_of(2)])
        assert state.step == step + 1
    assert rates == [[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]]


def test_the_sums_are_those_of_the_group_and_hold_no_graph(make_state):
    state = make_state(schedule=lambda _: 0.0)
    group = [batch_of(3, seed=1), batch_of(2, seed=2)]
    with torch.no_grad():
        losses = [F.cross_entropy(state.module(images), labels).item() for images, labels in group]
    sums = train_step(state, group)
    assert not sums.values.requires_grad
    metrics = sums.averages()
    assert metrics.count == 5
    assert metrics.loss == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-5)


def test_gradients_are_cleared_and_no_step_sees_those_of_the_last(make_state):
    state = make_state()
    train_step(state, [batch_of(2)])
    assert all(parameter.grad is None for parameter in state.module.parameters())


class HostReads(TorchDispatchMode):
    """Counts `.item()`, `bool(tensor)` and their kin."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
        return function(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device(make_state):
    state = make_state(label_smoothing=0.1)
    with HostReads() as reads:
        sums = train_step(state, [batch_of(3), batch_of(2)])
    assert reads.count == 0
    with HostReads() as reads:
        bool(sums.values[0] > 0)
    assert reads.count == 1


def test_a_step_runs_where_there_is_nothing_to_read(make_state):
    """Tensors on the meta device have no values: a read, a copy to the host or a branch on a value raises."""
    state = make_state(device="meta")
    sums = train_step(state, [batch_of(3, device="meta"), batch_of(2, device="meta")])
    assert sums.values.device.type == "meta"
    with pytest.raises(NotImplementedError):
        sums.averages()


def test_groups_of_micro_batches():
    assert list(grouped(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_fit_tells_the_observer_and_saves_after_every_epoch(make_state):
    recorder, saved = Recorder(), []
    state = make_state()
    fit_small(state, 3, epochs=2, observer=recorder, save=lambda s, is_best: saved.append((s.step, is_best, s.best)))
    assert [step for step, _ in recorder.steps] == [1, 2, 3, 4, 5, 6]
    assert recorder.pauses == 2
    assert [epoch for epoch, _, _ in recorder.epochs] == [0, 1]
    assert all((train.count, validation.count) == (12, 8) for _, train, validation in recorder.epochs)
    assert [(step, is_best) for step, is_best, _ in saved][0] == (3, True)
    assert [step for step, _, _ in saved] == [3, 6]
    accuracies = [validation.top1_percent for _, _, validation in recorder.epochs]
    assert state.best == (max(accuracies), accuracies.index(max(accuracies)))


def test_an_equal_accuracy_is_not_a_new_best(make_state):
    saved = []
    state = make_state(schedule=lambda _: 0.0, optim=OptimConfig(momentum=0.0))
    state.best = (100.0, 4)
    fit_small(state, 1, save=lambda _, is_best: saved.append(is_best))
    assert saved == [False]
    assert state.best == (100.0, 4)


def test_max_steps_ends_inside_an_epoch_with_a_validation(make_state):
    recorder, saved = Recorder(), []
    state = make_state()
    fit_small(state, 3, epochs=5, max_steps=4, observer=recorder, save=lambda s, _: saved.append(s.step))
    assert (state.step, saved) == (4, [3, 4])
    assert [(epoch, train.count) for epoch, train, _ in recorder.epochs] == [(0, 12), (1, 4)]


@pytest.mark.parametrize("stop", [3, 4])
def test_a_continued_run_equals_the_uninterrupted_one(make_state, stop):
    schedule = lambda step: 0.1 / (step + 1)
    whole, first, second = (make_state(schedule=schedule) for _ in range(3))
    fit_small(whole, 3, epochs=2, accumulation_steps=2)
    fit_small(first, 3, epochs=2, accumulation_steps=2, max_steps=stop)
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.step = first.step
    fit_small(second, 3, epochs=2, accumulation_steps=2)
    assert second.step == whole.step == 6
    assert_same_weights(second.module, whole.module)


def test_fit_takes_another_step(make_state):
    groups = []

    def step_function(state, group):
        groups.append(len(group))
        sums = MetricSums.zeros(state.device)
        sums.add(torch.tensor(1.5), torch.eye(10)[:4], torch.arange(4))
        state.step += 1
        return sums

    state, recorder = make_state(), Recorder()
    before = [parameter.clone() for parameter in state.module.parameters()]
    fit_small(state, 3, accumulation_steps=2, observer=recorder, step_function=step_function)
    assert groups == [2, 2, 2]
    assert (recorder.epochs[0][1].loss, recorder.epochs[0][1].top1_percent) == (1.5, 100.0)
    assert all(torch.equal(*pair) for pair in zip(before, state.module.parameters(), strict=True))


class Poisoned(Batches):
    def epoch(self, epoch, first_micro_batch=0, augment=True):
        for position, (images, labels) in enumerate(super().epoch(epoch, first_micro_batch)):
            yield images * (float("nan") if epoch == 1 and position == 1 else 1.0), labels


def test_a_loss_that_is_nan_ends_the_run_and_is_not_saved(make_state):
    saved, recorder = [], Recorder()
    with pytest.raises(DivergenceError, match=r"loss is nan at epoch 1 step 2 \(lr 0.05, loss scale 1; ") as caught:
        fit(make_state(), Poisoned(3), Batches(2), plan_of(3, epochs=3), observer=recorder,
            save=lambda s, _: saved.append(s.step))  # fmt: skip
    assert caught.value.exit_status == 3
    assert saved == [3]
    assert len(recorder.epochs) == 1


@pytest.mark.parametrize("steps_per_epoch", [1, 2])
def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(make_state, steps_per_epoch):
    """The last update of an epoch can spoil the weights after every training loss was finite."""
    rates = [0.05, float("inf")] if steps_per_epoch == 2 else [float("inf")]
    saved = []
    with pytest.raises(DivergenceError):
        fit_small(
            make_state(schedule=lambda step: rates[step]), steps_per_epoch, save=lambda s, _: saved.append(s.step)
        )
    assert not saved


class ConstantClass(nn.Module):
    """Always says class 0."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))

    def forward(self, images):
        return self.bias.expand(len(images), 3)


class Listed(list):
    """A list of batches that stands for a loader of validation."""

    num_left_out = 0


@pytest.mark.parametrize("batch_size", [1, 4, 7, 16])
def test_validation_counts_every_image_once(make_state, batch_size):
    labels = torch.tensor([0] * 4 + [1] * 3 + [2] * 3)
    loader = Listed(zip(torch.zeros(10, 3, 8, 8).split(batch_size), labels.split(batch_size), strict=True))
    model, cpu = ConstantClass(), torch.device("cpu")
    precision = make_precision(PrecisionConfig(), model, torch.optim.SGD(model.parameters()), cpu)
    state = dataclasses.replace(make_state(), module=model, precision=precision)
    metrics = validate(state, state.precision.weights(), loader, 10)
    assert (metrics.top1_percent, metrics.top5_percent, metrics.count) == (pytest.approx(40.0), 100.0, 10)


def test_validation_is_that_of_the_network_in_eval_mode_and_changes_nothing(make_state):
    state = make_state()
    train_step(state, [batch_of(8)])
    before = {name: value.clone() for name, value in state.module.state_dict().items()}
    twin = make_state().module.eval()
    twin.load_state_dict(before)
    images, labels = (torch.cat(parts) for parts in zip(*Batches(2), strict=True))
    with torch.no_grad():
        expected = F.cross_entropy(twin(images), labels).item()
    state.model = None  # the wrapper must not be called: ranks have different numbers of batches
    assert validate(state, state.precision.weights(), Batches(2), 8).loss == pytest.approx(expected, rel=1e-6)
    assert state.module.training
    assert all(torch.equal(before[name], value) for name, value in state.module.state_dict().items())
    assert all(parameter.grad is None for parameter in state.module.parameters())


@pytest.mark.parametrize("expected", [7, 9])
def test_validation_of_another_number_of_images_is_an_error(make_state, expected):
    with pytest.raises(RuntimeError, match=f"8 images of {expected}"):
        state = make_state()
        validate(state, state.precision.weights(), Batches(2), expected)


def test_images_that_validation_skips_are_missing_in_the_count_alone(make_state):
    loader = Batches(2)
    loader.num_left_out = 3
    state = make_state()
    weights = state.precision.weights()
    assert validate(state, weights, loader, 11).count == 8
    with pytest.raises(RuntimeError, match="8 images of 8, 3 skipped"):
        validate(state, weights, loader, 8)


def test_after_validation_comes_before_the_observer_and_saving(make_state):
    calls = []

    class Watcher(Recorder):
        def epoch_done(self, *arguments):
            calls.append("observer")

    fit_small(make_state(), 2, epochs=2, observer=Watcher(), save=lambda *_: calls.append("save"),
              after_validation=lambda: calls.append("after validation"))  # fmt: skip
    assert calls == ["after validation", "observer", "save"] * 2


def test_norms_train_again_after_a_validation(make_state):
    state = make_state()
    modes = []
    fit_small(state, 1, epochs=2, step_function=lambda s, g: modes.append(s.module.training) or train_step(s, g))
    assert modes == [True, True]


def test_seeds_differ_by_epoch_and_rank_and_are_pure():
    seeds = {epoch_seed(seed, epoch, rank) for seed in range(3) for epoch in range(5) for rank in range(8)}
    assert len(seeds) == 3 * 5 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert epoch_seed(1, 2, 3) == epoch_seed(1, 2, 3)


def test_every_epoch_seeds_the_generators(make_state):
    draws = []

    def step_function(state, group):
        draws.append(torch.rand(1).item())
        return train_step(state, group)

    for seed_of_the_caller in (1, 2):
        state = make_state()
        torch.manual_seed(seed_of_the_caller)
        fit_small(state, 1, epochs=2, step_function=step_function)
    assert draws[:2] == draws[2:]
    assert draws[0] != draws[1]


def test_ranks_meet_once_per_group(make_state, process_group):
    state = make_state()
    state.model = wrap_distributed_model(state.module, "cpu")
    synced = []
    state.model.register_forward_pre_hook(lambda model, _: synced.append(model.require_backward_grad_sync))
    plain = make_state()
    group = [batch_of(2, seed=1), batch_of(2, seed=2), batch_of(2, seed=3)]
    train_step(state, group)
    train_step(plain, group)
    assert synced == [False, False, True]
    for parameter, expected in zip(state.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)


def test_the_discarded_pass_changes_nothing(make_state, process_group):
    state = make_state()
    state.model = wrap_distributed_model(state.module, "cpu", gradient_as_bucket_view=True)
    before = {name: value.clone() for name, value in state.module.state_dict().items()}
    calls = []
    state.model.register_forward_pre_hook(lambda *_: calls.append(1))
    fix_summation_order(state, *batch_of(2))
    assert calls == [1]
    assert all(torch.equal(before[name], value) for name, value in state.module.state_dict().items())
    assert all(parameter.grad is None for parameter in state.module.parameters())
    assert (state.step, len(state.optimizer.state)) == (0, 0)


def test_without_a_wrapper_there_is_no_pass_to_discard(make_state, monkeypatch):
    state = make_state()
    monkeypatch.setattr(training, "cross_entropy", None)
    fix_summation_order(state, *batch_of(2))
