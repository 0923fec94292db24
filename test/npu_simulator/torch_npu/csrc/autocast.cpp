// The rules of autocast are PyTorch's own lists; here they are applied to boxed
// arguments, which compiles in a fraction of the time of PyTorch's templates.
#include "simulator.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace npu_simulator {
using at::Tensor;
using torch::jit::Stack;

template <class Function>
static void map_tensors(c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = function(tensor);
    value = c10::IValue(c10::List<Tensor>(list));
  }
}

template <class Function>
static void map_arguments(const c10::OperatorHandle& op, Stack& stack, const Function& function) {
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) map_tensors(stack[i], function);
}

static void call_with(const c10::OperatorHandle& op, Stack* stack, at::ScalarType type) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto cast = [type](const Tensor& tensor) { return at::autocast::cached_cast(type, tensor, kNPU); };
  map_arguments(op, *stack, cast);
  op.callBoxed(stack);
}

static void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_with(op, stack, at::autocast::get_autocast_dtype(kNPU));
}

static void in_float32(const c10::OperatorHandle& op, Stack* stack) { call_with(op, stack, at::kFloat); }

static void in_widest_type(const c10::OperatorHandle& op, Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(kNPU);
  const auto widen = [&](const Tensor& tensor) {
    widest = at::autocast::promote_type(widest, kNPU, tensor);
    return tensor;
  };
  map_arguments(op, *stack, widen);
  call_with(op, stack, widest);
}

// Operators that accumulate: float32 through their own `dtype` argument.
static void with_float32_argument(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t base = stack->size() - arguments.size();
  if (at::autocast::is_eligible((*stack)[base].toTensor(), kNPU))
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype" && (*stack)[base + i].isNone()) (*stack)[base + i] = c10::IValue(at::kFloat);
  op.callBoxed(stack);
}

static void refuse_binary_cross_entropy(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.");
}

#define SET_RULE(rule, name) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&rule>());
#define RULE(rule, op) SET_RULE(rule, #op)
#define OVERLOAD_RULE(rule, op, overload) SET_RULE(rule, #op "." #overload)
#define PICK(_1, _2, name, ...) name
#define LOWER_PRECISION(...) PICK(__VA_ARGS__, OVERLOAD_RULE, RULE)(in_lower_precision, __VA_ARGS__)
#define FLOAT32(...) PICK(__VA_ARGS__, OVERLOAD_RULE, RULE)(in_float32, __VA_ARGS__)
#define FLOAT32_ARGUMENT(...) PICK(__VA_ARGS__, OVERLOAD_RULE, RULE)(with_float32_argument, __VA_ARGS__)
#define WIDEST(...) PICK(__VA_ARGS__, OVERLOAD_RULE, RULE)(in_widest_type, __VA_ARGS__)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_ARGUMENT)
  AT_FORALL_PROMOTE(WIDEST)
  FLOAT32(norm, Scalar)
  FLOAT32(norm, ScalarOpt_dim)
  FLOAT32(norm, names_ScalarOpt_dim)
  RULE(refuse_binary_cross_entropy, binary_cross_entropy)
}

} // namespace npu_simulator
