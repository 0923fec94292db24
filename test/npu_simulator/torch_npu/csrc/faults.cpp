// Counters, and the failures that NPU_SIMULATOR_FAULT asks for:
//   kind[:key=value,...]     e.g. collective_timeout:rank=1,collective=12
// `rank` limits a fault to the process with that RANK, `once` names a file that
// the fault creates, so that it happens in one process and one time only.
#include "simulator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <limits>
#include <map>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace npu_simulator {

Counters& counters() {
  static Counters value;
  return value;
}

namespace {
struct Fault {
  std::string kind;
  std::map<std::string, std::string> values;

  int64_t number(const std::string& key, int64_t otherwise) const {
    const auto found = values.find(key);
    return found == values.end() ? otherwise : std::strtoll(found->second.c_str(), nullptr, 10);
  }
};

Fault read_fault() {
  const char* text = std::getenv("NPU_SIMULATOR_FAULT");
  Fault fault;
  if (!text || !*text) return fault;
  std::istringstream stream(text);
  std::getline(stream, fault.kind, ':');
  for (std::string pair; std::getline(stream, pair, ',');) {
    const auto at = pair.find('=');
    TORCH_CHECK(at != std::string::npos, "NPU_SIMULATOR_FAULT=", text, ": `", pair, "` is not key=value");
    fault.values[pair.substr(0, at)] = pair.substr(at + 1);
  }
  static const std::string kinds[] = {
      "busy", "port_taken", "collective_timeout", "dead_card", "out_of_memory", "no_libhccl"};
  TORCH_CHECK(std::find(std::begin(kinds), std::end(kinds), fault.kind) != std::end(kinds),
      "NPU_SIMULATOR_FAULT=", text, ": no such fault");
  return fault;
}

// The fault, if it is of this kind and meant for this rank.
const Fault* find_fault(const char* kind) {
  static const Fault fault = read_fault();
  if (fault.kind != kind) return nullptr;
  const char* rank = std::getenv("RANK");
  return fault.number("rank", -1) < 0 || fault.number("rank", -1) == std::atoi(rank ? rank : "0") ? &fault : nullptr;
}

bool is_first_time(const Fault& fault) {
  const auto found = fault.values.find("once");
  if (found == fault.values.end()) return true;
  const int file = ::open(found->second.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0644);
  if (file >= 0) ::close(file);
  return file >= 0;
}
} // namespace

void fault_at_start() {
  const Fault* fault = find_fault("busy");
  TORCH_CHECK(!fault || !is_first_time(*fault),
      "EJ0001: Failed to initialize the HCCP process. Reason: Maybe the last training process is running.\n"
      "        Solution: Wait for 10s after killing the last training process and try again. (simulated)");
}

void fault_at_group_creation() {
  const Fault* fault = find_fault("port_taken");
  TORCH_CHECK(!fault || !is_first_time(*fault),
      "EJ0003: Failed to bind the IP port. Reason: The IP address and port have been bound already. (simulated)");
}

void throw_wait_timeout(const std::string& cause) {
  C10_THROW_ERROR(DistBackendError,
      "EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not "
      "received the Notify record from a remote rank: " + cause + " (simulated)");
}

void fault_at_collective() {
  const Fault* fault = find_fault("collective_timeout");
  if (!fault || counters().collectives != fault->number("collective", 1)) return;
  std::this_thread::sleep_for(std::chrono::seconds(fault->number("seconds", 1)));
  throw_wait_timeout("injected at collective " + std::to_string(counters().collectives));
}

void fault_at_synchronization() {
  const Fault* fault = find_fault("dead_card");
  TORCH_CHECK(!fault || counters().kernels < fault->number("kernel", 0),
      "ACL stream synchronize failed, error code:507046 (simulated)\n"
      "[ERROR] ERR00100 PTA call acl api failed");
}

int64_t fault_memory_bytes() {
  const Fault* fault = find_fault("out_of_memory");
  return fault ? fault->number("bytes", 0) : std::numeric_limits<int64_t>::max();
}

} // namespace npu_simulator
