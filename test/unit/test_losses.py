import pytest
import torch
import torch.nn.functional as F

from image_classification.losses import cross_entropy

NUM_IMAGES, NUM_CLASSES = 32, 10


@pytest.fixture
def labels():
    return torch.arange(NUM_IMAGES) % NUM_CLASSES


def make_logits(dtype):
    generator = torch.Generator().manual_seed(0)
    return (4 * torch.randn(NUM_IMAGES, NUM_CLASSES, generator=generator)).to(dtype).requires_grad_()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torchs_loss_in_double_precision(dtype, label_smoothing, labels):
    logits = make_logits(dtype)
    loss = cross_entropy(logits, labels, label_smoothing)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, labels, label_smoothing=label_smoothing)
    assert loss.dtype == torch.float32 and loss.shape == ()
    # A loss computed in bfloat16 or float16 would be off by about 1e-2 or 1e-3.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_classes", [2, 3, 100])
def test_smoothing_is_the_paper_formula_for_any_number_of_classes(num_classes):
    e = 0.1
    logits = torch.randn(8, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % num_classes
    target = (1 - e) * F.one_hot(labels, num_classes) + e / num_classes
    expected = -(target * logits.log_softmax(dim=1)).sum(dim=1).mean()
    assert cross_entropy(logits, labels, e).item() == pytest.approx(expected.item(), rel=1e-6)


def soft_targets(num_classes=NUM_CLASSES):
    return torch.rand(NUM_IMAGES, num_classes, generator=torch.Generator().manual_seed(1)).softmax(dim=1)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_soft_targets_weigh_the_classes(dtype, label_smoothing):
    logits, targets = make_logits(dtype), soft_targets()
    loss = cross_entropy(logits, targets, label_smoothing)
    exact = logits.detach().double().requires_grad_()
    smooth = (1 - label_smoothing) * targets.double() + label_smoothing / NUM_CLASSES
    log_probabilities = exact - exact.exp().sum(dim=1, keepdim=True).log()
    expected = -(smooth * log_probabilities).sum() / NUM_IMAGES
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_label_and_its_target_are_the_same(labels, label_smoothing):
    logits = make_logits(torch.float32)
    one_hot = F.one_hot(labels, NUM_CLASSES).float()
    torch.testing.assert_close(
        cross_entropy(logits, one_hot, label_smoothing), cross_entropy(logits, labels, label_smoothing)
    )


def test_soft_targets_are_not_read_by_the_host():
    """Tensors on the meta device have no values to read."""
    assert cross_entropy(make_logits(torch.float16).to("meta"), soft_targets().to("meta"), 0.1).is_meta


def test_computes_in_float32_under_autocast(labels):
    logits = make_logits(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(logits, labels, 0.1)
        soft = cross_entropy(logits, soft_targets(), 0.1)
    assert torch.equal(loss, cross_entropy(logits, labels, 0.1))
    assert torch.equal(soft, cross_entropy(logits, soft_targets(), 0.1))


def test_large_half_precision_logits_stay_finite():
    logits = torch.tensor([[60000.0, -60000.0]], dtype=torch.float16)
    assert cross_entropy(logits, torch.tensor([1])).item() == pytest.approx(120000, rel=1e-3)
