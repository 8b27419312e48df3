#include "parallel/ddp/hook_call.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

/// Whose hook it was, for errors.
struct Place {
  std::size_t index;
  std::size_t parameters;
  std::string first, last;
  ProcessGroup group;
};

[[noreturn]] void fail(const Place& place, const char* what) {
  const std::string text = fmt::format(
      "the communication hook failed for bucket {} on rank {}, which holds the gradients of {} parameter{} ({}{}): {}",
      place.index, place.group.rank(), place.parameters, place.parameters == 1 ? "" : "s", place.first,
      place.parameters == 1 ? "" : " to " + place.last, what);
  place.group.abort(text);
  throw Error(text, {.rank = place.group.rank(), .call = "communication hook", .bucket = place.index});
}

template <class Call>
auto guarded(const Place& place, const Call& call) {
  try {
    return call();
  } catch (const PeerLost&) {
    throw;
  } catch (const Timeout&) {
    throw;
  } catch (const CollectiveMismatch&) {
    throw;
  } catch (const std::exception& error) {
    fail(place, error.what());
  }
}

}  // namespace

PendingReduction call_hook(const CommHook& hook, GradBucket bucket, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const Place place{bucket.index, bucket.names.size(), bucket.names.front(), bucket.names.back(), group};
  const at::Tensor buffer = bucket.buffer;
  PendingReduction pending = guarded(place, [&] { return hook(bucket); });
  if (!pending.finish) return pending;
  pending.finish = [place, buffer, finish = std::move(pending.finish)] {
    guarded(place, [&] {
      const at::Tensor reduced = finish();
      if (!reduced.defined() || reduced.is_same(buffer)) return;
      if (reduced.sizes() != buffer.sizes())
        throw InvalidArgument(fmt::format("its finish returned a tensor of [{}] where the bucket has [{}]",
                                          fmt::join(reduced.sizes(), ", "), fmt::join(buffer.sizes(), ", ")));
      buffer.copy_(reduced);
    });
    return at::Tensor();
  };
  return pending;
}

}  // namespace ddpkit
