#include <ddpkit/train/together.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <exception>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/train/main.h>

namespace ddpkit::train {

void run_together(const ProcessGroup& group, const std::function<void()>& body) {
  std::string message;
  bool invalid_argument = false;
  try {
    body();
  } catch (const InvalidArgument& error) {
    message = error.what();
    invalid_argument = true;
  } catch (...) {
    message = one_sentence(std::current_exception());
  }
  // First byte: '.' went well, 'i' an InvalidArgument, 'e' any other error; behind it the message.
  const char status = message.empty() ? '.' : invalid_argument ? 'i' : 'e';
  const std::vector<std::string> outcomes = group.all_gather_bytes(status + message);
  for (int rank = 0; rank < static_cast<int>(outcomes.size()); ++rank) {
    const std::string& outcome = outcomes[rank];
    if (outcome.empty() || outcome.front() == '.') continue;
    const Error::Context context{.rank = rank};
    if (outcome.front() == 'i') throw InvalidArgument(outcome.substr(1), context);
    throw Error(outcome.substr(1), context);
  }
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
