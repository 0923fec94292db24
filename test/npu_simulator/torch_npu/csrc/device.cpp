// Devices, streams, events, random numbers: what PyTorch asks of a backend.
#include "simulator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <mutex>
#include <pthread.h>
#include <vector>

namespace npu_simulator {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// ---- the current device and stream of each thread

static thread_local DeviceIndex current_index = 0;
static thread_local c10::StreamId current_streams[kMaxCards] = {};
static std::atomic<int64_t> next_stream{1};

static void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < card_count(), "Invalid NPU device id ", int(index), "; this process sees ",
      card_count(), " NPU(s) (simulated)\n[ERROR] ERR00001 PTA invalid parameter");
}

static std::atomic<bool> started{false}, bad_fork{false};

void start_device() {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must "
      "use the 'spawn' start method");
  if (started) return;
  fault_at_start();
  pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
  started = true;
}

bool in_bad_fork() { return bad_fork; }
DeviceIndex current_device() { return current_index; }

DeviceIndex set_device(DeviceIndex index) {
  check_index(index);
  return std::exchange(current_index, index);
}

DeviceIndex index_of(Device device) {
  if (!device.has_index()) return current_index;
  check_index(device.index());
  return device.index();
}

// Kernels run at once, so that an event is only a point in time.
using TimePoint = std::chrono::steady_clock::time_point;

static void synchronize() {
  ++counters().synchronizations;
  fault_at_synchronization();
}

struct NPUGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNPU;
  static Stream stream_on(Device device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, Device(kNPU, index_of(device)), id);
  }
  c10::DeviceType type() const override { return kNPU; }
  Device exchangeDevice(Device d) const override {
    return Device(kNPU, d.has_index() ? set_device(d.index()) : current_index);
  }
  Device getDevice() const override { return Device(kNPU, current_index); }
  void setDevice(Device d) const override { set_device(index_of(d)); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) current_index = d.index();
  }
  Stream getStream(Device d) const override { return stream_on(d, current_streams[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream_on(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream_on(d, next_stream++); }
  Stream getNewStream(Device d, int) const override { return stream_on(d, next_stream++); }
  Stream exchangeStream(Stream s) const override {
    return stream_on(s.device(), std::exchange(current_streams[index_of(s.device())], s.id()));
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<TimePoint*>(event); }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new TimePoint;
    *static_cast<TimePoint*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    const auto time = *static_cast<TimePoint*>(to) - *static_cast<TimePoint*>(from);
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void synchronizeEvent(void*) const override { synchronize(); }
  void synchronizeStream(const Stream&) const override { synchronize(); }
  void synchronizeDevice(DeviceIndex) const override { synchronize(); }
  DeviceIndex deviceCount() const noexcept override { return card_count(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NPUGuard);

// ---- random numbers: the CPU's generator, one for each card

struct NPUGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  NPUGenerator(DeviceIndex index, at::Generator inner)
      : c10::GeneratorImpl(Device(kNPU, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  NPUGenerator* clone_impl() const override { return new NPUGenerator(device_.index(), cpu.clone()); }
};

static at::Generator make_generator(DeviceIndex index) {
  return at::make_generator<NPUGenerator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < kMaxCards; ++i) all.push_back(make_generator(i));
    return all;
  }();
  if (index < 0) index = current_index;
  check_index(index);
  return generators[index];
}

at::Generator inner_generator(const at::Generator& npu) {
  return static_cast<NPUGenerator*>(npu.unsafeGetGeneratorImpl())->cpu;
}

struct NPUHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return card_count() > 0; }
  void init() const override { start_device(); }
  DeviceIndex deviceCount() const override { return card_count(); }
  bool hasPrimaryContext(DeviceIndex index) const override { return was_touched(index); }
  void setCurrentDevice(DeviceIndex index) const override { set_device(index); }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_index : set_device(index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void*) const override { return Device(kNPU, current_index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator(index < 0 ? current_index : index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};
static const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new NPUHooks);
  return true;
}();

} // namespace npu_simulator
