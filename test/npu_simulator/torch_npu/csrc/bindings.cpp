// What the Python side of the package uses: the module torch_npu._C.
#include "simulator.h"

#include <torch/csrc/utils/pybind.h>

namespace npu_simulator {
void bind_hccl(pybind11::module& module);

static std::map<std::string, std::atomic<int64_t>*> counters_by_name() {
  auto& c = counters();
  return {{"synchronizations", &c.synchronizations}, {"host_reads", &c.host_reads},
      {"host_to_device_copies", &c.host_to_device_copies},
      {"blocking_host_to_device_copies", &c.blocking_host_to_device_copies}, {"kernels", &c.kernels},
      {"collectives", &c.collectives}, {"collective_bytes", &c.collective_bytes}};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("soc_name", [] { return chip().name; });
  module.def("saturates", [] { return chip().saturates; });
  module.def("has_bfloat16", [] { return chip().has_bfloat16; });
  module.def("device_count", &card_count);
  module.def("start_device", &start_device);
  module.def("in_bad_fork", &in_bad_fork);
  module.def("current_device", [] { return int(current_device()); });
  module.def("set_device", [](int index) { return int(set_device(index)); });
  module.def("default_generator", [](int index) { return default_generator(index); });
  module.def("read_overflow_flag", [](int index) { return overflow_flag(index).load(); });
  module.def("clear_overflow_flag", [](int index) { overflow_flag(index) = false; });
  module.def("set_conv_hf32", [](bool allowed) { precision().conv_hf32 = allowed; });
  module.def("set_matmul_hf32", [](bool allowed) { precision().matmul_hf32 = allowed; });
  module.def("set_float32_as_half", [](bool allowed) { precision().float32_as_half = allowed; });
  module.def("read_counters", [] {
    std::map<std::string, int64_t> values;
    for (const auto& [name, counter] : counters_by_name()) values[name] = *counter;
    return values;
  });
  module.def("reset_counters", [] {
    for (const auto& [name, counter] : counters_by_name()) *counter = 0;
  });
  bind_hccl(module);
}

} // namespace npu_simulator
