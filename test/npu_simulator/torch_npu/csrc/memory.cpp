// Device memory, which is host memory; the accounting; pinned memory; aliases.
#include "simulator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_set>

namespace npu_simulator {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;

// ---- accounting

using c10::CachingAllocator::Stat;
static std::mutex accounts_mutex;
static Stat allocated_bytes[kMaxCards], allocations[kMaxCards];
static std::atomic<int64_t> failures{0};
static std::atomic<bool> touched[kMaxCards];

bool was_touched(DeviceIndex index) { return index >= 0 && index < kMaxCards && touched[index]; }

void check_room(size_t bytes, DeviceIndex index) {
  std::lock_guard<std::mutex> guard(accounts_mutex);
  const int64_t held = allocated_bytes[index].current;
  if (held + int64_t(bytes) <= std::min(chip().memory_bytes, fault_memory_bytes())) return;
  ++failures;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", bytes / 1048576.0, " MiB (NPU ",
      int(index), "; ", chip().memory_bytes / 1048576.0, " MiB total capacity; ", held / 1048576.0,
      " MiB already allocated; simulated)");
}

// What an NPU storage holds: the CPU storage with its memory.
struct Holder {
  c10::Storage cpu;
  size_t bytes;
  DeviceIndex index;
};

static void delete_holder(void* context) {
  std::unique_ptr<Holder> holder(static_cast<Holder*>(context));
  std::lock_guard<std::mutex> guard(accounts_mutex); // let go before the holder is
  allocated_bytes[holder->index].decrease(holder->bytes);
  allocations[holder->index].decrease(1);
}

static c10::DataPtr hold(c10::Storage cpu, DeviceIndex index) {
  start_device();
  touched[index] = true;
  const size_t bytes = cpu.nbytes();
  {
    std::lock_guard<std::mutex> guard(accounts_mutex);
    allocated_bytes[index].increase(bytes);
    allocations[index].increase(1);
  }
  void* data = cpu.mutable_data();
  return c10::DataPtr(data, new Holder{std::move(cpu), bytes, index}, &delete_holder, Device(kNPU, index));
}

struct NPUAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    check_room(bytes, index);
    return hold(c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true), index);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> guard(accounts_mutex);
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      (*bytes)[0] = allocated_bytes[index];
    stats.allocation[0] = stats.active[0] = allocations[index];
    stats.num_ooms = failures;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(accounts_mutex);
    allocated_bytes[index].reset_accumulated();
    allocations[index].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(accounts_mutex);
    allocated_bytes[index].reset_peak();
    allocations[index].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(accounts_mutex);
    return {chip().memory_bytes - allocated_bytes[index].current, chip().memory_bytes};
  }
};
static NPUAllocator npu_allocator;
REGISTER_ALLOCATOR(kNPU, &npu_allocator);

// ---- pinned host memory: ordinary memory whose address is remembered

static std::mutex pinned_mutex;
static std::unordered_set<const void*> pinned;

static void delete_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.erase(data);
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    TORCH_CHECK(data, "cannot allocate ", bytes, " bytes of pinned memory");
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.insert(data);
    return c10::DataPtr(data, data, &delete_pinned, Device(c10::kCPU));
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_pinned; }
};

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* storage_begin) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  return pinned.count(storage_begin) > 0;
}

// ---- aliases

static Holder* holder_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &delete_holder ? static_cast<Holder*>(data.get_context()) : nullptr;
}

static c10::Storage cpu_storage(const c10::Storage& npu) {
  if (auto* holder = holder_of(npu)) return holder->cpu;
  // Memory that somebody else allocated: a CPU view that keeps it alive.
  auto* keep = new c10::Storage(npu);
  c10::DataPtr data(npu.mutable_data(), keep, [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), npu.nbytes(), std::move(data), nullptr, false);
}

Tensor over_storage(c10::Storage storage, const Tensor& like, DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

Tensor cpu_alias(const Tensor& npu) {
  if (!npu.defined() || npu.device().type() != kNPU) return npu;
  TORCH_CHECK_NOT_IMPLEMENTED(npu.layout() == at::kStrided, npu.layout(), " tensors are not simulated on the NPU");
  return over_storage(cpu_storage(npu.storage()), npu, DispatchKey::CPU);
}

Tensor npu_wrap(const Tensor& cpu, DeviceIndex index) {
  if (!cpu.defined() || !cpu.device().is_cpu()) return cpu;
  if (cpu._is_zerotensor()) return npu_wrap(at::zeros(cpu.sizes(), cpu.options()), index); // it has no memory
  TORCH_CHECK_NOT_IMPLEMENTED(cpu.layout() == at::kStrided, cpu.layout(), " tensors are not simulated on the NPU");
  TORCH_CHECK_NOT_IMPLEMENTED(!cpu.unsafeGetTensorImpl()->is_python_dispatch(),
      "tensor subclasses are not simulated on the NPU");
  check_dtype(cpu.scalar_type());
  const c10::Storage& memory = cpu.storage();
  check_room(memory.nbytes(), index);
  c10::Storage npu(c10::Storage::use_byte_size_t(), memory.nbytes(), hold(memory, index), &npu_allocator, true);
  return over_storage(std::move(npu), cpu, DispatchKey::PrivateUse1);
}

void follow_storage(const c10::Storage& npu) {
  auto* holder = holder_of(npu);
  if (!holder || (holder->cpu.data() == npu.data() && holder->cpu.nbytes() == npu.nbytes())) return;
  const c10::Storage cpu = holder->cpu;
  npu.unsafeGetStorageImpl()->set_data_ptr_noswap(hold(cpu, holder->index)); // deletes the old holder
  npu.unsafeGetStorageImpl()->set_nbytes(cpu.nbytes());
}

void resize_storage(const c10::Storage& npu, size_t bytes) {
  auto* holder = holder_of(npu);
  TORCH_CHECK(holder, "cannot resize NPU memory that the simulator did not allocate");
  if (bytes > holder->bytes) check_room(bytes - holder->bytes, holder->index);
  at::native::resize_bytes_cpu(holder->cpu.unsafeGetStorageImpl(), bytes);
  follow_storage(npu);
}

} // namespace npu_simulator
