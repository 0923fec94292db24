// One boxed kernel for every operator without one of its own: it swaps the NPU
// arguments for CPU aliases, calls the CPU operator, and wraps what comes back.
#include "simulator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace npu_simulator {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;

// ---- what is known of an operator

struct Traits {
  bool launches_kernel; // false for views and questions about metadata
  bool reads_on_host; // its result is a number that the host waits for
  bool has_dynamic_shape; // the host waits for the size of its result
  bool is_random;
  bool may_mix; // takes CPU tensors beside NPU tensors, as on a real card
  bool copies_indices; // to the device; `index` itself asks for that copy
  bool is_matrix_product;
  bool adds_to_product; // its first argument is a summand: addmm and its kin
  bool is_float32_at_most;
  std::vector<size_t> written; // indices of the arguments that it writes
};

static bool any_of(const std::string& name, const std::unordered_set<std::string>& names) {
  return names.count(name) > 0;
}

static Traits find_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  Traits traits{};
  bool gives_new_tensor = schema.returns().empty();
  for (const auto& value : schema.returns()) {
    const auto kind = value.type()->kind();
    const bool is_tensor = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    gives_new_tensor |= is_tensor && (!value.alias_info() || value.alias_info()->isWrite());
  }
  traits.launches_kernel = gives_new_tensor;
  traits.reads_on_host = op.hasTag(at::Tag::data_dependent_output);
  // index takes masks, whose size must be counted, and numbers, whose need not
  traits.has_dynamic_shape = op.hasTag(at::Tag::dynamic_output_shape) && name != "aten::index";
  traits.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.may_mix = any_of(name, {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_pack_padded_sequence", "aten::_ctc_loss", "aten::set_"});
  traits.copies_indices = traits.may_mix && name != "aten::index";
  traits.adds_to_product = any_of(name, {"aten::addmm", "aten::baddbmm", "aten::addmv", "aten::addbmm"});
  // in place it would read what it writes; PyTorch itself calls the `out` variant then
  traits.is_matrix_product = (!schema.is_mutable() || schema.overload_name() == "out") &&
      (traits.adds_to_product || any_of(name, {"aten::mm", "aten::bmm", "aten::mv", "aten::dot"}));
  traits.is_float32_at_most = any_of(name, {"aten::native_batch_norm", "aten::_native_batch_norm_legit",
      "aten::_batch_norm_with_update", "aten::native_batch_norm_backward", "aten::batch_norm_backward"});
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) traits.written.push_back(i);
  }
  return traits;
}

static const Traits& traits_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const void*, Traits> cache; // a schema lives as long as its operator
  const void* key = &op.schema();
  auto found = cache.find(key);
  if (found == cache.end()) found = cache.emplace(key, find_traits(op)).first;
  return found->second;
}

// ---- one call

struct Call {
  c10::SmallVector<std::pair<Tensor, Tensor>, 8> aliases; // of every NPU argument
  std::optional<Device> tensors_on, asked_for;
  bool has_cpu_tensor = false, has_generator = false;
  c10::SmallVector<size_t, 2> missing_generators;

  Tensor enter(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kNPU) {
      has_cpu_tensor |= tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    if (!tensors_on) tensors_on = tensor.device();
    TORCH_CHECK(*tensors_on == tensor.device(), "Expected all tensors to be on the same device, but found at least "
        "two devices, ", *tensors_on, " and ", tensor.device(), "!");
    for (auto& [npu, cpu] : aliases)
      if (npu.is_same(tensor)) return cpu;
    aliases.emplace_back(tensor, cpu_alias(tensor));
    return aliases.back().second;
  }

  Tensor leave(const Tensor& result, DeviceIndex index) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [npu, cpu] : aliases)
      if (cpu.is_same(result)) return npu;
    if (result.layout() == at::kStrided)
      for (auto& [npu, cpu] : aliases) // a view of an argument shares its storage
        if (cpu.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
          return over_storage(npu.storage(), result, c10::DispatchKey::PrivateUse1);
    saturate_(result, index);
    return npu_wrap(result, index);
  }

  void enter(IValue& value, const c10::Argument& argument, size_t position) {
    if (value.isTensor()) {
      value = enter(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = enter(tensor);
      value = IValue(c10::List<Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(enter(*tensor)) : std::nullopt);
      value = IValue(list);
    } else if (value.isDevice()) {
      if (value.toDevice().type() != kNPU) return;
      asked_for = Device(kNPU, index_of(value.toDevice()));
      value = IValue(Device(c10::kCPU));
    } else if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kNPU,
          "Expected a 'npu' device type for generator but found '", generator.device().type(), "'");
      value = IValue(inner_generator(generator));
      has_generator = true;
    } else if (value.isNone()) {
      const auto optional = argument.type()->cast<c10::OptionalType>();
      if (optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType)
        missing_generators.push_back(position);
    }
  }

  // Memory is shared: after a write only the metadata has to follow.
  void follow_writes() {
    for (auto& [npu, cpu] : aliases) {
      auto* impl = npu.unsafeGetTensorImpl();
      follow_storage(npu.storage());
      if (npu.sizes() != cpu.sizes() || npu.strides() != cpu.strides() || npu.storage_offset() != cpu.storage_offset())
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      // linalg_lu_solve.out flips the conjugate bit of its argument
      if (npu.is_conj() != cpu.is_conj()) impl->_set_conj(cpu.is_conj());
      if (npu.is_neg() != cpu.is_neg()) impl->_set_neg(cpu.is_neg());
    }
  }
};

// A random operator without a Generator argument (native_dropout) draws from the
// card's numbers and leaves the CPU's as they were.
class CardNumbers {
 public:
  explicit CardNumbers(DeviceIndex index)
      : lock_(mutex_), cpu_(at::detail::getDefaultCPUGenerator()), card_(inner_generator(default_generator(index))),
        saved_(cpu_.get_state()) {
    cpu_.set_state(card_.get_state());
  }
  ~CardNumbers() {
    card_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  static inline std::mutex mutex_;
  std::lock_guard<std::mutex> lock_;
  at::Generator cpu_, card_;
  Tensor saved_;
};

// A matrix product on widened or rounded copies of its arguments.
class Product {
 public:
  Product(torch::jit::Stack& stack, size_t base, const Traits& traits, DeviceIndex index) {
    const size_t num_inputs = stack.size() - base - traits.written.size(); // `out` is the last argument
    std::optional<at::ScalarType> type;
    for (size_t i = base; i < base + num_inputs; ++i) {
      if (!stack[i].isTensor()) continue;
      const auto its_type = stack[i].toTensor().scalar_type();
      if (type && *type != its_type) return; // the operator itself refuses the mix
      type = its_type;
    }
    if (!type || !c10::isFloatingType(*type)) return;
    for (size_t i = base; i < base + num_inputs; ++i) {
      const bool is_summand = traits.adds_to_product && i == base && *type == at::kFloat;
      if (stack[i].isTensor() && !is_summand)
        stack[i] = matrix_input(stack[i].toTensor(), precision().matmul_hf32, index);
    }
    if (!is_low_precision(*type)) return;
    rounded_to_ = type;
    if (traits.written.empty()) return;
    out_ = stack.back().toTensor();
    stack.back() = at::empty({0}, at::kFloat);
  }

  void finish(torch::jit::Stack& stack) const {
    if (!rounded_to_) return;
    const Tensor result = stack.back().toTensor();
    if (out_.defined()) out_.resize_(result.sizes()).copy_(result);
    stack.back() = out_.defined() ? out_ : result.to(*rounded_to_);
  }

 private:
  std::optional<at::ScalarType> rounded_to_;
  Tensor out_;
};

static void count(const Traits& traits, const Call& call) {
  auto& counted = counters();
  if (traits.launches_kernel) ++counted.kernels;
  if (traits.reads_on_host) {
    ++counted.host_reads;
    fault_at_synchronization();
  }
  if (traits.has_dynamic_shape) ++counted.synchronizations;
  if (traits.copies_indices && call.has_cpu_tensor) {
    ++counted.host_to_device_copies;
    ++counted.blocking_host_to_device_copies;
  }
}

static void run_on_cpu(const c10::OperatorHandle& op, const Traits& traits, bool has_generator, DeviceIndex index,
    torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::optional<CardNumbers> numbers;
  if (traits.is_random && !has_generator) numbers.emplace(index);
  op.callBoxed(stack);
}

static void leave_results(Call& call, torch::jit::Stack& stack, size_t first, DeviceIndex index) {
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      stack[i] = call.leave(stack[i].toTensor(), index);
    } else if (stack[i].isTensorList()) {
      auto list = stack[i].toTensorVector();
      for (auto& tensor : list) tensor = call.leave(tensor, index);
      stack[i] = IValue(c10::List<Tensor>(list));
    }
  }
}

static void append_tensors(const IValue& value, std::vector<Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (!value.isTensorList()) return;
  for (const auto& tensor : value.toTensorVector()) tensors.push_back(tensor);
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& traits = traits_of(op);
  const size_t num_arguments = schema.arguments().size();
  const size_t base = stack->size() - num_arguments;
  Call call;
  for (size_t i = 0; i < num_arguments; ++i) call.enter((*stack)[base + i], schema.arguments()[i], base + i);

  TORCH_CHECK(!call.has_cpu_tensor || !call.tensors_on || traits.may_mix, "Expected all tensors to be on the same "
      "device, but found at least two devices, ", *call.tensors_on, " and cpu! (in ", schema.name(), ")");
  const Device device = call.asked_for ? *call.asked_for : call.tensors_on.value_or(Device(kNPU, current_device()));
  for (const auto position : call.missing_generators) {
    (*stack)[position] = IValue(inner_generator(default_generator(device.index())));
    call.has_generator = true;
  }
  count(traits, call);
  if (traits.is_float32_at_most)
    for (auto& [npu, cpu] : call.aliases)
      TORCH_CHECK_NOT_IMPLEMENTED(npu.scalar_type() != at::kDouble, schema.name(), " has no float64 (simulated)");

  std::vector<Tensor> written; // kept, for the call takes its arguments off the stack
  if (chip().saturates)
    for (const auto i : traits.written) append_tensors((*stack)[base + i], written);
  std::optional<Product> product;
  if (traits.is_matrix_product) product.emplace(*stack, base, traits, device.index());
  run_on_cpu(op, traits, call.has_generator, device.index(), stack);
  if (product) product->finish(*stack);
  for (const auto& cpu : written) saturate_(cpu, device.index());
  if (schema.is_mutable()) call.follow_writes();
  leave_results(call, *stack, stack->size() - schema.returns().size(), device.index());
}

void count_copy(const Tensor& destination, const Tensor& source, bool non_blocking) {
  auto& counted = counters();
  const bool from_card = source.device().type() == kNPU, to_card = destination.device().type() == kNPU;
  if (from_card && to_card) {
    ++counted.kernels;
  } else if (from_card) {
    ++counted.host_reads;
    fault_at_synchronization();
  } else if (to_card) {
    ++counted.host_to_device_copies;
    if (!non_blocking || !is_pinned(source.storage().data())) ++counted.blocking_host_to_device_copies;
  }
}

static void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": sparse and quantized tensors are not simulated on the NPU");
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

} // namespace npu_simulator
