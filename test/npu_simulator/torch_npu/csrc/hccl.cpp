// "hccl": a process group that runs each collective of an inner gloo group on
// the CPU aliases of NPU tensors. Memory is shared, so results land in place.
#include "simulator.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <set>
#include <thread>
#include <variant>

namespace npu_simulator {
using at::Tensor;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Clock = std::chrono::steady_clock;

// ---- work: hands back NPU tensors, and waits as long as hccl does

struct HcclWork final : c10d::Work {
  WorkPointer inner;
  c10::IValue outputs;
  Clock::time_point deadline;

  HcclWork(int rank, WorkPointer work, c10::IValue results, std::chrono::seconds timeout)
      : Work(rank), inner(std::move(work)), outputs(std::move(results)), deadline(Clock::now() + timeout) {}

  // A rank does not notice that another is gone: it waits for its full time.
  [[noreturn]] static void wait_in_vain(Clock::time_point deadline, const std::string& cause) {
    std::this_thread::sleep_until(deadline);
    throw_wait_timeout(cause);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool is_chosen = timeout != kNoTimeout && timeout != c10d::kUnsetTimeout;
      return inner->wait(is_chosen ? timeout : time_left()); // gloo itself would wait for ever
    } catch (const std::exception& error) {
      wait_in_vain(deadline, error.what());
    }
  }
  std::chrono::milliseconds time_left() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { inner->abort(); }
  uint64_t getSequencenumber() const override { return inner->getSequencenumber(); }
  Tensors result() override {
    if (outputs.isTensorList()) return outputs.toTensorVector();
    Tensors flat;
    for (const c10::IValue& list : outputs.toListRef())
      for (const auto& tensor : list.toTensorVector()) flat.push_back(tensor);
    return flat;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::set<c10::DeviceIndex> cards;
    for (const auto& tensor : result()) cards.insert(tensor.device().index());
    std::vector<c10::Device> devices;
    for (const auto card : cards) devices.emplace_back(kNPU, card);
    auto future = c10::make_intrusive<c10::ivalue::Future>(outputs.type(), devices);
    inner->getFuture()->addCallback([future, outputs = outputs, deadline = deadline](c10::ivalue::Future& done) {
      if (!done.hasError()) return future->markCompleted(outputs);
      try {
        wait_in_vain(deadline, done.tryRetrieveErrorMessage());
      } catch (...) {
        future->setError(std::current_exception());
      }
    });
    return future;
  }
};

// ---- what hccl takes

static const char* const kInvalidType = "\n[ERROR] ERR02002 DIST invalid type (simulated)";

static void check(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kNPU && tensor.layout() == at::kStrided,
      "Tensors must be NPU and dense", kInvalidType);
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous", kInvalidType);
}

static void check_reducible(const Tensor& tensor, bool takes_bytes) {
  using at::ScalarType;
  const auto type = tensor.scalar_type();
  const bool refused = type == ScalarType::Double || type == ScalarType::UInt16 || type == ScalarType::UInt32 ||
      type == ScalarType::UInt64 || c10::isFloat8Type(type) ||
      (!takes_bytes && (type == ScalarType::Bool || type == ScalarType::Byte));
  TORCH_CHECK(!refused, "hccl cannot reduce ", type, kInvalidType);
}

static void check_operation(const ReduceOp& operation) {
  for (const auto refused : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR, ReduceOp::PREMUL_SUM})
    TORCH_CHECK(operation.op_ != refused, "Cannot use this ReduceOp with HCCL (number ", int(refused), ", simulated)");
}

static Tensors enter(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) {
    check(tensor);
    aliases.push_back(cpu_alias(tensor));
  }
  return aliases;
}

static TensorLists enter(const TensorLists& lists) {
  TensorLists aliases;
  for (const auto& list : lists) aliases.push_back(enter(list));
  return aliases;
}

// gloo splits along the first dimension, hccl a flat buffer
static Tensor enter_flat(const Tensor& tensor) { return enter(Tensors{tensor})[0].view({-1}); }

static int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

static int64_t bytes_of(const TensorLists& lists) {
  int64_t bytes = 0;
  for (const auto& list : lists) bytes += bytes_of(list);
  return bytes;
}

static void begin_collective(int64_t bytes) {
  ++counters().collectives;
  counters().collective_bytes += bytes;
  fault_at_synchronization();
  fault_at_collective();
}

struct ProcessGroupHCCL final : c10d::Backend {
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("hccl") {}
    std::unordered_map<std::string, std::variant<int64_t, std::string>> hccl_config;
    bool is_high_priority_stream = false;
    std::vector<uint64_t> global_ranks_in_group;
    std::string group_id;
  };

  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<Options> options;
  std::chrono::seconds wait_timeout;

  ProcessGroupHCCL(c10::intrusive_ptr<c10d::Backend> inner, c10::intrusive_ptr<Options> chosen, int64_t seconds)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)), options(std::move(chosen)),
        wait_timeout(seconds) {
    gloo->setTimeout(wait_timeout);
  }
  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options; }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  WorkPointer leave(WorkPointer work, c10::IValue outputs) {
    return c10::make_intrusive<HcclWork>(getRank(), std::move(work), std::move(outputs), wait_timeout);
  }

  // gloo has no average: hccl also divides a sum
  template <class Options_, class Run>
  WorkPointer reduce_with(Options_ chosen, Tensors& aliases, const Tensors& outputs, const Run& run) {
    check_operation(chosen.reduceOp);
    const bool average = chosen.reduceOp.op_ == ReduceOp::AVG;
    if (average) chosen.reduceOp = ReduceOp::SUM;
    const WorkPointer work = leave(run(chosen), outputs);
    if (!average) return work;
    work->wait();
    for (auto& alias : aliases) alias.div_(getSize());
    return work;
  }

  // Bytes travel as int32.
  template <class Options_, class Run>
  WorkPointer reduce_bytes_too(const Options_& chosen, Tensors& tensors, const Run& run) {
    for (const auto& tensor : tensors) check_reducible(tensor, true);
    Tensors aliases = enter(tensors), wide;
    for (const auto& alias : aliases) {
      const auto type = alias.scalar_type();
      wide.push_back(type == at::kBool || type == at::kByte ? alias.to(at::kInt) : alias);
    }
    const WorkPointer work = reduce_with(chosen, wide, tensors, [&](const Options_& o) { return run(wide, o); });
    for (size_t i = 0; i < aliases.size(); ++i) {
      if (wide[i].is_same(aliases[i])) continue;
      work->wait();
      aliases[i].copy_(wide[i]);
    }
    return work;
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& chosen) override {
    begin_collective(bytes_of(tensors));
    return reduce_bytes_too(chosen, tensors, [&](Tensors& t, const auto& o) { return gloo->allreduce(t, o); });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& chosen) override {
    begin_collective(bytes_of(tensors));
    const auto run = [&](Tensors& t, const auto& o) { return gloo->allreduce_coalesced(t, o); };
    return reduce_bytes_too(chosen, tensors, run);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& chosen) override {
    begin_collective(bytes_of(tensors));
    return reduce_bytes_too(chosen, tensors, [&](Tensors& t, const auto& o) { return gloo->reduce(t, o); });
  }
  WorkPointer reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& chosen) override {
    begin_collective(bytes_of(in));
    for (const auto& tensor : out) check_reducible(tensor, false);
    Tensors to = enter(out);
    TensorLists from = enter(in);
    return reduce_with(chosen, to, out, [&](const auto& o) { return gloo->reduce_scatter(to, from, o); });
  }
  WorkPointer _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& chosen) override {
    begin_collective(in.nbytes());
    check_reducible(out, false);
    Tensors to{enter_flat(out)};
    Tensor from = enter_flat(in);
    return reduce_with(chosen, to, {out}, [&](const auto& o) { return gloo->_reduce_scatter_base(to[0], from, o); });
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& chosen) override {
    begin_collective(bytes_of(in));
    for (const auto& tensor : out) check_reducible(tensor, false);
    Tensors to = enter(out), from = enter(in);
    const auto run = [&](const auto& o) { return gloo->reduce_scatter_tensor_coalesced(to, from, o); };
    return reduce_with(chosen, to, out, run);
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& chosen) override {
    begin_collective(bytes_of(tensors));
    Tensors aliases = enter(tensors);
    return leave(gloo->broadcast(aliases, chosen), tensors);
  }
  WorkPointer allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& chosen) override {
    begin_collective(bytes_of(in));
    TensorLists to = enter(out);
    Tensors from = enter(in);
    return leave(gloo->allgather(to, from, chosen), out);
  }
  WorkPointer _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& chosen) override {
    begin_collective(in.nbytes());
    Tensor to = enter_flat(out), from = enter_flat(in);
    return leave(gloo->_allgather_base(to, from, chosen), Tensors{out});
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& chosen) override {
    begin_collective(bytes_of(in));
    Tensors to = enter(out), from = enter(in);
    return leave(gloo->allgather_into_tensor_coalesced(to, from, chosen), out);
  }
  WorkPointer gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& chosen) override {
    begin_collective(bytes_of(in));
    TensorLists to = enter(out);
    Tensors from = enter(in);
    return leave(gloo->gather(to, from, chosen), out);
  }
  WorkPointer scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& chosen) override {
    begin_collective(bytes_of(in));
    Tensors to = enter(out);
    TensorLists from = enter(in);
    return leave(gloo->scatter(to, from, chosen), out);
  }
  WorkPointer alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& chosen) override {
    begin_collective(in.nbytes());
    Tensor to = enter(Tensors{out})[0], from = enter(Tensors{in})[0];
    return leave(gloo->alltoall_base(to, from, out_sizes, in_sizes, chosen), Tensors{out});
  }
  WorkPointer alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& chosen) override {
    begin_collective(bytes_of(in));
    Tensors to = enter(out), from = enter(in);
    return leave(gloo->alltoall(to, from, chosen), out);
  }
  WorkPointer barrier(const c10d::BarrierOptions& chosen) override {
    begin_collective(0);
    auto on_cpu = chosen;
    on_cpu.device_ids.clear();
    on_cpu.device.reset();
    return leave(gloo->barrier(on_cpu), Tensors{});
  }
  WorkPointer send(Tensors& tensors, int rank, int tag) override {
    Tensors aliases = enter(tensors);
    return leave(gloo->send(aliases, rank, tag), tensors);
  }
  WorkPointer recv(Tensors& tensors, int rank, int tag) override {
    Tensors aliases = enter(tensors);
    return leave(gloo->recv(aliases, rank, tag), tensors);
  }
  WorkPointer recvAnysource(Tensors&, int) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "hccl does not support recv from any source\n[ERROR] ERR02007 DIST (simulated)");
  }
};

void bind_hccl(pybind11::module& module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");
  auto submodule = module.def_submodule("_distributed_c10d");
  using Group = ProcessGroupHCCL;
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>> group(submodule, "ProcessGroupHCCL");
  group.def_readonly("options", &Group::options);
  py::class_<Group::Options, c10d::Backend::Options, c10::intrusive_ptr<Group::Options>>(group, "Options")
      .def(py::init<>())
      .def_readwrite("hccl_config", &Group::Options::hccl_config)
      .def_readwrite("is_high_priority_stream", &Group::Options::is_high_priority_stream)
      .def_readwrite("global_ranks_in_group", &Group::Options::global_ranks_in_group)
      .def_readwrite("group_id", &Group::Options::group_id);
  submodule.def("_wrap_gloo", [](const c10::intrusive_ptr<c10d::Backend>& gloo,
      const c10::intrusive_ptr<Group::Options>& options, int64_t seconds) {
    fault_at_group_creation();
    return c10::make_intrusive<Group>(gloo, options, seconds);
  });
}

} // namespace npu_simulator

// DistributedDataParallel times its passes on devices that have a timer, and warns on others.
namespace c10d {
struct NpuTimer final : Timer {
  explicit NpuTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, NpuTimer)
} // namespace c10d
