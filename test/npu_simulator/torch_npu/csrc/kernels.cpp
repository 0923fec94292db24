// Operators that the fallback cannot give: those that make, move or reshape memory.
#include "simulator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace npu_simulator {
using at::Tensor;
using c10::Device;
using c10::IntArrayRef;
using c10::SymIntArrayRef;
template <class T>
using Maybe = std::optional<T>;

// ---- new tensors

static void check_options(Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout, Maybe<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided,
      *layout, " tensors are not simulated on the NPU");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  check_dtype(c10::dtype_or_default(dtype));
}

static Tensor empty(IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout, Maybe<Device> device,
    Maybe<bool> pinned, Maybe<at::MemoryFormat> format) {
  check_options(dtype, layout, pinned);
  const auto type = c10::dtype_or_default(dtype);
  const auto index = index_of(c10::device_or_default(device));
  check_room(c10::multiply_integers(size) * c10::elementSize(type), index); // before the host allocates
  return npu_wrap(at::detail::empty_cpu(size, type, false, format), index);
}

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout,
    Maybe<Device> device, Maybe<bool> pinned) {
  check_options(dtype, layout, pinned);
  const auto type = c10::dtype_or_default(dtype);
  const auto index = index_of(c10::device_or_default(device));
  check_room(at::detail::computeStorageNbytes(size, stride, c10::elementSize(type)), index);
  return npu_wrap(at::detail::empty_strided_cpu(size, stride, type, false), index);
}

// ---- copies

// Not left to ATen's copy_, which calls _copy_from: with a conjugate or negated
// source that recurses for ever.
static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  count_copy(self, source, non_blocking);
  const Tensor destination = cpu_alias(self);
  destination.copy_(cpu_alias(source));
  if (self.device().type() == kNPU && self.scalar_type() != source.scalar_type())
    saturate_(destination, self.device().index());
  return self;
}

static Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  Tensor target = destination;
  return copy_(target, self, non_blocking);
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

// A cast to float64 that names no device gives float32.
static Tensor to_copy(const Tensor& self, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout, Maybe<Device> device,
    Maybe<bool> pinned, bool non_blocking, Maybe<at::MemoryFormat> format) {
  if (dtype == at::kDouble && !device) {
    TORCH_WARN_ONCE("Device do not support double dtype now, dtype cast replace with float. (simulated)");
    dtype = at::kFloat;
  }
  return at::native::_to_copy(self, dtype, layout, device, pinned, non_blocking, format);
}

// ---- geometry

static const Tensor& resize_(const Tensor& self, SymIntArrayRef size, Maybe<at::MemoryFormat> format) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor alias = cpu_alias(self);
  alias.resize_(C10_AS_INTARRAYREF_SLOW(size), format);
  follow_storage(self.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  return self;
}

static Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, SymIntArrayRef size,
    SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return self;
}

static Tensor& set_storage_only(Tensor& self, c10::Storage source) {
  const c10::SymInt elements(int64_t(source.nbytes() / self.dtype().itemsize()));
  return set_storage(self, std::move(source), 0, SymIntArrayRef(&elements, 1), {});
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

static Tensor& set_empty(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

static bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

static Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, Maybe<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

static Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

// ---- loss scaling

// Where half precision saturates, the card's flag tells of an overflow; asking
// for it clears it.
static void check_and_unscale(at::TensorList gradients, Tensor& found_inf, const Tensor& inverse_scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ++counters().kernels;
  std::vector<Tensor> aliases;
  for (const auto& gradient : gradients) aliases.push_back(cpu_alias(gradient));
  Tensor found = cpu_alias(found_inf);
  at::_amp_foreach_non_finite_check_and_unscale_(aliases, found, cpu_alias(inverse_scale));
  if (chip().saturates && overflow_flag(found_inf.device().index()).exchange(false)) found.fill_(1);
}

static Tensor& update_scale(Tensor& scale, Tensor& growth_tracker, const Tensor& found_inf, double growth,
    double backoff, int64_t interval) {
  TORCH_CHECK_NOT_IMPLEMENTED(!chip().saturates, "aten::_amp_update_scale_ has no kernel on ", chip().name,
      "; use torch_npu.npu.amp.GradScaler (simulated)");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ++counters().kernels;
  Tensor scale_alias = cpu_alias(scale), tracker_alias = cpu_alias(growth_tracker);
  at::_amp_update_scale_(scale_alias, tracker_alias, cpu_alias(found_inf), growth, backoff, interval);
  return scale;
}

static void record_stream(Tensor&, c10::Stream) {}

static int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const Maybe<Tensor>&, double, bool,
    Maybe<double>, bool) {
  return 0; // plain matrix products
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_to_copy", TORCH_FN(to_copy));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_storage_only));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_empty));
  library.impl("is_set_to", TORCH_FN(is_set_to));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("_amp_foreach_non_finite_check_and_unscale_", TORCH_FN(check_and_unscale));
  library.impl("_amp_update_scale_", TORCH_FN(update_scale));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("_fused_sdp_choice", TORCH_FN(fused_sdp_choice));
}

} // namespace npu_simulator
