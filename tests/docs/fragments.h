// The context of the pages' C++ fragments: see docs/architecture.md.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/optimizer_state.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/safetensors.h>
#include <ddpkit/train/seed.h>
#include <ddpkit/train/state_dict.h>
#include <ddpkit/train/stop_signal.h>
#include <ddpkit/train/summary_writer.h>
#include <ddpkit/train/together.h>

namespace ddpkit::docs {

/// A block to run. Constructed before main().
class Fragment {
 public:
  Fragment(const char* where, void (*run)(ProcessGroup)) : where_(where), run_(run) { all().push_back(this); }

  const char* where() const { return where_; }
  void run(const ProcessGroup& group) const { run_(group); }
  static std::vector<const Fragment*>& all();

 private:
  const char* where_;
  void (*run_)(ProcessGroup);
};

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not so: " + what);
}

}  // namespace ddpkit::docs
