// Convolutions as the matrix unit computes them.
#include "simulator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace npu_simulator {
using at::Tensor;
using c10::IntArrayRef;

static void check_same_device(std::initializer_list<Tensor> tensors) {
  std::optional<c10::Device> device;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
        "devices, ", *device, " and ", tensor.device(), "!");
  }
}

static Tensor convolution_input(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return matrix_input(cpu_alias(tensor), precision().conv_hf32, tensor.device().index());
}

static Tensor convolution_result(const Tensor& cpu, const Tensor& like) {
  if (!cpu.defined()) return cpu;
  const Tensor rounded = cpu.to(like.scalar_type());
  saturate_(rounded, like.device().index());
  return npu_wrap(rounded, like.device().index());
}

static Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& maybe_bias,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups) {
  const Tensor bias = maybe_bias.value_or(Tensor());
  check_same_device({x, weight, bias});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  ++counters().kernels;
  std::optional<Tensor> summand;
  if (bias.defined()) {
    const auto type = x.scalar_type();
    summand = cpu_alias(bias).to(is_low_precision(type) ? at::kFloat : type);
  }
  const Tensor y = at::convolution(convolution_input(x), convolution_input(weight), summand, stride, padding, dilation,
      transposed, output_padding, groups);
  return convolution_result(y, x);
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x,
    const Tensor& weight, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
    IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  check_same_device({gradient, x, weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  ++counters().kernels;
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [for_x, for_weight, for_bias] = at::convolution_backward(convolution_input(gradient),
      convolution_input(x), convolution_input(weight), IntArrayRef{channels}, stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  return {convolution_result(for_x, x), convolution_result(for_weight, weight), convolution_result(for_bias, weight)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

} // namespace npu_simulator
