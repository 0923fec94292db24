// The two generations that are played, and their arithmetic.
#include "simulator.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/nan_to_num.h>

#include <algorithm>
#include <array>
#include <cstdlib>

namespace npu_simulator {

static int64_t number_from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  TORCH_CHECK(*end == 0 && value >= 0, name, "=", text, " is not a number");
  return value;
}

static Chip make_chip() {
  const char* text = std::getenv("NPU_SIMULATOR_SOC");
  const std::string name = text && *text ? text : "Ascend910B3";
  const bool first_generation = name == "Ascend910A";
  TORCH_CHECK(first_generation || name == "Ascend910B3",
      "NPU_SIMULATOR_SOC=", name, " is not played; use Ascend910A or Ascend910B3");
  const int64_t megabytes = number_from_environment("NPU_SIMULATOR_MEMORY_MB", first_generation ? 32768 : 65536);
  return {name, first_generation, !first_generation, megabytes << 20};
}

const Chip& chip() {
  static const Chip value = make_chip();
  return value;
}

// As the real runtime reads the mask: characters other than digits and commas
// end it, an id that is not there ends it, and one out of order leaves nothing.
static int count_visible(int cards) {
  const char* mask = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!mask) return cards;
  int visible = 0;
  long previous = -1;
  for (const char* p = mask; *p >= '0' && *p <= '9';) {
    char* end = nullptr;
    const long id = std::strtol(p, &end, 10);
    if (id <= previous) return 0;
    if (id >= cards) break;
    previous = id;
    ++visible;
    p = *end == ',' ? end + 1 : end;
    if (*end != ',') break;
  }
  return visible;
}

int card_count() {
  static const int count = count_visible(
      std::min<int64_t>(number_from_environment("NPU_SIMULATOR_CARDS", 8), kMaxCards));
  return count;
}

Precision& precision() {
  static Precision value = [] {
    Precision p;
    p.float32_as_half = chip().saturates; // the first generation's default
    return p;
  }();
  return value;
}

std::atomic<bool>& overflow_flag(c10::DeviceIndex card) {
  static std::array<std::atomic<bool>, kMaxCards> flags{};
  return flags[card];
}

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK(dtype != at::kBFloat16 || chip().has_bfloat16,
      chip().name, " does not support bfloat16 (simulated)");
  TORCH_CHECK_NOT_IMPLEMENTED(!c10::isQIntType(dtype), "quantized tensors are not simulated on the NPU (", dtype, ")");
}

bool is_low_precision(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

static bool saturate_bits(uint16_t* begin, int64_t count) {
  uint16_t seen = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t x = begin[i];
    const bool special = (x & 0x7c00) == 0x7c00;
    const uint16_t fixed = (x & 0x03ff) ? 0 : ((x & 0x8000) | 0x7bff);
    begin[i] = special ? fixed : x;
    seen |= special;
  }
  return seen != 0;
}

void saturate_(const at::Tensor& cpu, c10::DeviceIndex card) {
  if (!chip().saturates || !cpu.defined() || cpu.scalar_type() != at::kHalf || cpu.numel() == 0) return;
  bool overflow = false;
  if (cpu.is_non_overlapping_and_dense()) {
    overflow = saturate_bits(static_cast<uint16_t*>(cpu.mutable_data_ptr()), cpu.numel());
  } else {
    overflow = !at::isfinite(cpu).all().item<bool>();
    if (overflow) cpu.copy_(at::nan_to_num(cpu, 0.0, 65504.0, -65504.0));
  }
  if (overflow) overflow_flag(card) = true;
}

// HF32 keeps 11 of float32's 23 bits of mantissa; ties go to even.
static at::Tensor round_to_hf32(const at::Tensor& cpu) {
  const at::Tensor rounded = cpu.clone(); // dense, whatever `cpu` was
  auto* bits = static_cast<uint32_t*>(rounded.mutable_data_ptr());
  for (int64_t i = 0, n = rounded.numel(); i < n; ++i) {
    const uint32_t x = bits[i];
    const bool finite = (x & 0x7f800000u) != 0x7f800000u;
    bits[i] = finite ? (x + 0x7ffu + ((x >> 12) & 1u)) & ~0xfffu : x;
  }
  return rounded;
}

at::Tensor matrix_input(const at::Tensor& cpu, bool hf32, c10::DeviceIndex card) {
  if (!cpu.defined()) return cpu;
  const auto dtype = cpu.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(dtype != at::kDouble, "the NPU has no float64 matrix product or convolution (simulated)");
  if (is_low_precision(dtype)) return cpu.to(at::kFloat);
  if (dtype != at::kFloat) return cpu;
  if (precision().float32_as_half) {
    const at::Tensor half = cpu.to(at::kHalf);
    saturate_(half, card);
    return half.to(at::kFloat);
  }
  return hf32 ? round_to_hf32(cpu) : cpu;
}

} // namespace npu_simulator
