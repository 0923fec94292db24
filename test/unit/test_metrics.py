import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from image_classification.losses import cross_entropy
from image_classification.metrics import MetricSums, count_correct, top_k

# The constant-class oracle: 4 + 3 + 3 images and a model that always answers class 0.
ORACLE_LABELS = torch.tensor([0] * 4 + [1] * 3 + [2] * 3)
ORACLE_LOGITS = torch.tensor([[1.0, 0.0, 0.0]]).expand(10, 3)


def sums_over(logits, labels, batch_size):
    sums = MetricSums.zeros("cpu")
    for start in range(0, len(labels), batch_size):
        part = slice(start, start + batch_size)
        sums.add(cross_entropy(logits[part], labels[part]), logits[part], labels[part])
    return sums


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_constant_class_oracle_scores_forty_percent_for_any_batch_and_ranks(batch_size, world_size):
    total = MetricSums.zeros("cpu")
    for rank in range(world_size):
        part = slice(rank, None, world_size)
        total = total + sums_over(ORACLE_LOGITS[part], ORACLE_LABELS[part], batch_size)
    metrics = total.averages()
    assert metrics.top1_percent == 40.0
    assert metrics.top5_percent == 100.0
    assert metrics.count == 10
    assert metrics.loss == pytest.approx(cross_entropy(ORACLE_LOGITS, ORACLE_LABELS).item(), rel=1e-6)


@pytest.mark.parametrize(("k", "correct"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (100, 4)])
def test_count_correct_counts_labels_among_the_k_largest(k, correct):
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(4, 4)
    count = count_correct(logits, torch.arange(4), k)
    assert count.item() == correct
    assert count.dtype == torch.int64 and count.shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_agree_with_a_ranking_by_hand(dtype):
    generator = torch.Generator().manual_seed(0)
    # Distinct small integers, so that bfloat16 has no ties.
    logits = torch.stack([torch.randperm(10, generator=generator) for _ in range(64)]).to(dtype)
    labels = torch.randint(10, (64,), generator=generator)
    ranks = [sorted(row, reverse=True).index(row[label]) for row, label in zip(logits.tolist(), labels, strict=True)]
    metrics = sums_over(logits, labels, 10).averages()
    assert 0 < metrics.top1_percent == 100 * sum(rank < 1 for rank in ranks) / 64
    assert metrics.top5_percent == 100 * sum(rank < 5 for rank in ranks) / 64 < 100


@pytest.mark.parametrize(("num_classes", "k"), [(2, 2), (3, 3), (5, 5), (10, 5), (1000, 5)])
def test_top_k_names_what_top5_percent_counts(num_classes, k):
    assert top_k(num_classes) == k
    logits = -torch.arange(float(num_classes)).expand(num_classes, num_classes)
    metrics = sums_over(logits, torch.arange(num_classes), num_classes).averages()
    assert metrics.top5_percent == pytest.approx(100 * k / num_classes)


def test_counts_are_exact_up_to_two_to_the_24():
    sums = MetricSums(torch.tensor([0.0, 2.0**24 - 3, 2.0**24 - 2, 2.0**24 - 1]))
    sums.add(torch.tensor(0.0), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert sums.values.tolist() == [0, 2**24 - 2, 2**24 - 1, 2**24]
    assert sums.averages().count == 2**24


def test_add_keeps_no_graph():
    logits = torch.zeros(2, 3, requires_grad=True)
    labels = torch.tensor([0, 1])
    sums = MetricSums.zeros("cpu")
    sums.add(cross_entropy(logits, labels), logits, labels)
    assert not sums.values.requires_grad


def test_adding_sums_leaves_both_unchanged():
    a, b = sums_over(ORACLE_LOGITS, ORACLE_LABELS, 4), sums_over(ORACLE_LOGITS, ORACLE_LABELS, 7)
    total = a + b
    assert (a.averages().count, b.averages().count, total.averages().count) == (10, 10, 20)


def test_no_image_has_no_average():
    with pytest.raises(ValueError, match="no image"):
        MetricSums.zeros("cpu").averages()


class NoTransfers(TorchDispatchMode):
    """Refuses to read a tensor's number to the host and to copy a tensor between devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("host read")
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            raise AssertionError("copy between devices")
        return result


def test_add_moves_nothing_between_host_and_device():
    # A meta tensor has no numbers, so reading one fails too; it stands for any device that is not the host.
    logits, labels = torch.empty(8, 10, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    sums = MetricSums.zeros("meta")
    with NoTransfers():
        sums.add(cross_entropy(logits, labels), logits, labels)
        count_correct(logits, labels, 5)
        with pytest.raises(AssertionError, match="host read"):
            torch.ones(1).item()
        with pytest.raises(AssertionError, match="copy between devices"):
            torch.ones(1).to("meta")
    assert sums.values.device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        sums.averages()
