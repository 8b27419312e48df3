#include "plan.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit::bench {

std::vector<std::uint64_t> Plan::sizes() const {
  return size_steps(parse_bytes(min_bytes), parse_bytes(max_bytes), step_factor);
}

void declare(train::Options& options, Plan& plan) {
  options.add("collective", &plan.collectives, "Collectives to measure; by default all");
  options.add("memory", &plan.memory, "symmetric (from ProcessGroup::allocate), private")
      .one_of({"symmetric", "private"});
  options.add("min_bytes", &plan.min_bytes, "Smallest size").also("b");
  options.add("max_bytes", &plan.max_bytes, "Largest size, always measured").also("e");
  options.add("step_factor", &plan.step_factor, "Factor between sizes").between(2, 1 << 20).also("f");
  options.add("device", &plan.device, "cpu or cuda, one GPU per rank").one_of({"cpu", "cuda"});
  options.add("no_pin", &plan.no_pin, "Do not pin ranks to cores (default: one core per rank if there are enough)");
  options.add("iters", &plan.timing.iterations, "Timed calls per size (default: as many as fit into 0.2 s)")
      .between(1, 1e8);
  options.add("batch_us", &plan.timing.batch_us, "Duration of a timed batch of calls in us; 20000 if ranks share cores")
      .between(1, 1e7);
  options.add("warmup", &plan.timing.warmup, "Calls for warm-up per size (default: as many as fit into 0.05 s)")
      .between(1, 1e8);
}

std::vector<std::string> to_arguments(const Plan& plan) {
  std::vector<std::string> arguments = {"--collective",  fmt::format("{}", fmt::join(plan.collectives, ",")),
                                        "--memory",      fmt::format("{}", fmt::join(plan.memory, ",")),
                                        "--min-bytes",   plan.min_bytes,
                                        "--max-bytes",   plan.max_bytes,
                                        "--step-factor", std::to_string(plan.step_factor),
                                        "--device",      plan.device};
  if (plan.timing.iterations > 0)
    arguments.insert(arguments.end(), {"--iters", std::to_string(plan.timing.iterations)});
  if (plan.timing.warmup > 0) arguments.insert(arguments.end(), {"--warmup", std::to_string(plan.timing.warmup)});
  if (plan.no_pin) arguments.emplace_back("--no-pin");
  arguments.insert(arguments.end(), {"--batch-us", std::to_string(plan.timing.batch_us)});
  return arguments;
}

std::uint64_t parse_bytes(std::string_view text) {
  constexpr std::string_view kUnits = "KMGT";
  std::uint64_t number = 0;
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(stop, text.data() + text.size());
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  int shift = 0;
  if (!unit.empty() && kUnits.find(unit[0]) != std::string_view::npos) {
    shift = 10 * (static_cast<int>(kUnits.find(unit[0])) + 1);
    unit.erase(0, 1);
    if (unit == "IB") unit = "B";
  }
  const bool is_size = status == std::errc{} && (unit.empty() || unit == "B");
  if (!is_size || number == 0 || number > (UINT64_C(1) << 46 >> shift))
    throw InvalidArgument(fmt::format("\"{}\" is not a size in bytes: write 4096, 4K or 96M", text));
  return number << shift;
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; unit < 4 && bytes >= 1024 && bytes % 1024 == 0; ++unit) bytes /= 1024;
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

std::vector<std::uint64_t> size_steps(std::uint64_t min, std::uint64_t max, int factor) {
  if (min > max)
    throw InvalidArgument(
        fmt::format("the smallest size, {}, is above the largest size, {}", format_bytes(min), format_bytes(max)));
  std::vector<std::uint64_t> sizes;
  const auto step = static_cast<std::uint64_t>(factor);
  for (std::uint64_t size = min; size < max; size *= step) {
    sizes.push_back(size);
    if (size > max / step) break;
  }
  sizes.push_back(max);
  return sizes;
}

}  // namespace ddpkit::bench
