#include <ddpkit/train/together.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <ddpkit/comm/process_group.h>

#include "parallel/model_agreement.h"

namespace ddpkit::train {

void run_together(const ProcessGroup& group, const std::function<void()>& body) {
  run_on_all_ranks(group, "run_together", body);
}

std::string broadcast_bytes(const ProcessGroup& group, std::string bytes, int root) {
  if (group.world_size() == 1) return bytes;
  const at::Tensor size = at::tensor(static_cast<std::int64_t>(bytes.size()), at::kLong).to(group.device());
  group.broadcast(size, root);
  bytes.resize(static_cast<std::size_t>(size.item<std::int64_t>()));
  if (bytes.empty()) return bytes;
  const at::Tensor host = at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
  const at::Tensor content = host.to(group.device());
  group.broadcast(content, root);
  if (!content.is_alias_of(host)) host.copy_(content);
  return bytes;
}

}  // namespace ddpkit::train
