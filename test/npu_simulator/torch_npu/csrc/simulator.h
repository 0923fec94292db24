// A simulated Ascend NPU: PyTorch's PrivateUse1 device on host memory.
//
// Every NPU storage is a shell around a CPU storage, so the CPU tensor over the
// same memory (the "alias") costs one TensorImpl and no copy. Kernels run on
// the aliases; views, in-place operators and undeclared writes all just work.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <optional>
#include <string>

namespace npu_simulator {

constexpr c10::DeviceType kNPU = c10::DeviceType::PrivateUse1;
constexpr int kMaxCards = 64;

// ---- chip.cpp: which generation is played, and how it computes

struct Chip {
  std::string name;
  bool saturates; // half precision has no inf and no NaN; an overflow sets a flag
  bool has_bfloat16;
  int64_t memory_bytes;
};
const Chip& chip();
int card_count();

struct Precision {
  bool conv_hf32 = true;
  bool matmul_hf32 = false;
  bool float32_as_half = false; // ACL_PRECISION_MODE=allow_fp32_to_fp16
};
Precision& precision();

std::atomic<bool>& overflow_flag(c10::DeviceIndex card);
void check_dtype(at::ScalarType dtype);
// Makes `cpu` hold what the chip would: where it saturates, inf becomes the
// largest number and NaN zero, and the card's overflow flag is set.
void saturate_(const at::Tensor& cpu, c10::DeviceIndex card);
// What the matrix unit multiplies: half precision widened to float32, float32
// rounded as the switches say, float64 refused. Takes and gives a CPU tensor.
at::Tensor matrix_input(const at::Tensor& cpu, bool hf32, c10::DeviceIndex card);
bool is_low_precision(at::ScalarType dtype);

// ---- faults.cpp: counters, and failures on demand (NPU_SIMULATOR_FAULT)

struct Counters {
  std::atomic<int64_t> synchronizations{0}, host_reads{0}, host_to_device_copies{0},
      blocking_host_to_device_copies{0}, kernels{0}, collectives{0}, collective_bytes{0};
};
Counters& counters();

void fault_at_start(); // a busy device
void fault_at_group_creation(); // a port that is taken
void fault_at_collective(); // a wait that times out
void fault_at_synchronization(); // a dead card
int64_t fault_memory_bytes(); // the limit of injected memory shortage; max if none
[[noreturn]] void throw_wait_timeout(const std::string& cause);

// ---- device.cpp

c10::DeviceIndex current_device();
c10::DeviceIndex set_device(c10::DeviceIndex index); // gives the previous one
c10::DeviceIndex index_of(c10::Device device); // the current one where it has none
void start_device(); // first use in this process
bool in_bad_fork();
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator inner_generator(const at::Generator& npu);

// ---- memory.cpp

c10::Allocator* pinned_allocator();
bool is_pinned(const void* storage_begin);
bool was_touched(c10::DeviceIndex index);
void check_room(size_t bytes, c10::DeviceIndex index);
at::Tensor cpu_alias(const at::Tensor& npu);
// An NPU tensor over a CPU tensor's memory, which it keeps alive.
at::Tensor npu_wrap(const at::Tensor& cpu, c10::DeviceIndex index);
// A tensor with the geometry of `like` over `storage`.
at::Tensor over_storage(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key);
// Follows a CPU kernel that re-allocated the shared storage.
void follow_storage(const c10::Storage& npu);
void resize_storage(const c10::Storage& npu, size_t bytes);

// ---- fallback.cpp

void count_copy(const at::Tensor& destination, const at::Tensor& source, bool non_blocking);

} // namespace npu_simulator
