#include "comm/shm_backend.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/shm_backend.h>

namespace ddpkit {
namespace {

using shm::CollectiveKind;
using shm::DataType;
using shm::Engine;
using shm::Request;

class ShmWork : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<Engine> engine, shm::OperationHandle operation, c10d::OpType type,
          std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout)
      : c10d::Work(engine->rank(), type),
        engine_(std::move(engine)),
        operation_(std::move(operation)),
        outputs_(std::move(outputs)),
        timeout_(timeout) {}

  bool isCompleted() override {
    if (exception_) return true;
    try {
      return engine_->test(operation_);
    } catch (...) {
      exception_ = std::current_exception();
      return true;
    }
  }
  bool isSuccess() const override { return !exception_; }
  std::exception_ptr exception() const override { return exception_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (exception_) std::rethrow_exception(exception_);
    try {
      engine_->wait(operation_, timeout == kNoTimeout ? timeout_ : timeout);
    } catch (...) {
      exception_ = std::current_exception();
      throw;
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { engine_->abort("the program aborted a collective"); }

 private:
  std::shared_ptr<Engine> engine_;
  shm::OperationHandle operation_;
  std::vector<at::Tensor> outputs_;
  std::chrono::milliseconds timeout_;
};

DataType data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return DataType::kUInt8;
    case at::kChar:
      return DataType::kInt8;
    case at::kShort:
      return DataType::kInt16;
    case at::kInt:
      return DataType::kInt32;
    case at::kLong:
      return DataType::kInt64;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kFloat:
    case at::kComplexFloat:
      return DataType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return DataType::kFloat64;
    case at::kBool:
      return DataType::kBool;
    default:
      throw InvalidArgument(fmt::format("the shm backend has no collectives for tensors of type {}", c10::toString(dtype)));
  }
}

/// Elements of data_type(): a complex number counts as two.
std::size_t element_count(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1);
}

void check_tensor(const at::Tensor& tensor, const char* call) {
  if (!tensor.defined()) throw InvalidArgument(fmt::format("{}: the tensor is undefined", call));
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided)
    throw InvalidArgument(fmt::format("{}: the shm backend takes dense CPU tensors, not {} on {}", call,
                                      c10::str(tensor.layout()), tensor.device().str()));
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.size() != 1)
    throw InvalidArgument(fmt::format("{}: one tensor a call, not {}", call, tensors.size()));
  check_tensor(tensors[0], call);
  return tensors[0];
}

shm::Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  if (op.op_ > c10d::ReduceOp::BXOR)
    throw InvalidArgument("all_reduce: the shm backend does not know this reduction");
  const auto wanted = static_cast<shm::Reduction>(op.op_);
  const bool complex_order =
      tensor.is_complex() && wanted != shm::Reduction::kSum && wanted != shm::Reduction::kAvg;
  if (complex_order || !shm::supports(data_type(tensor.scalar_type()), wanted))
    throw InvalidArgument(
        fmt::format("all_reduce: this reduction is not defined for {}", c10::toString(tensor.scalar_type())));
  return wanted;
}

/// Reads the same on every rank of one host, container and user, and differs otherwise.
std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat pid_namespace {};
  ::stat("/proc/self/ns/pid", &pid_namespace);
  return fmt::format("{}/{}/{}", boot, pid_namespace.st_ino, ::geteuid());
}

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

/// Every rank's `text`; names those that did not come. [rank]
std::vector<std::string> exchange(c10d::Store& store, int rank, int world_size, const std::string& text,
                                  std::chrono::milliseconds timeout) {
  const auto key = [](int r) { return fmt::format("shm/{}", r); };
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<std::string> texts;
  try {
    store.set(key(rank), bytes_of(text));
    auto nap = std::chrono::microseconds(200);
    while (texts.size() < static_cast<std::size_t>(world_size)) {
      const int next = static_cast<int>(texts.size());
      // Asked for rather than waited for: c10d logs a warning about every wait that ends without an answer.
      if (store.check({key(next)})) {
        const auto value = store.get(key(next));
        texts.emplace_back(value.begin(), value.end());
        continue;
      }
      if (std::chrono::steady_clock::now() > deadline) {
        std::vector<int> missing;
        for (int r = next; r < world_size; ++r) {
          if (!store.check({key(r)})) missing.push_back(r);
        }
        throw RendezvousError(fmt::format("rank{} {} of {} did not come within {:.1f} s", missing.size() == 1 ? "" : "s",
                                          fmt::join(missing, ", "), world_size,
                                          std::chrono::duration<double>(timeout).count()),
                              {.rank = missing.empty() ? -1 : missing.front(), .call = "rendezvous"});
      }
      std::this_thread::sleep_for(nap);
      nap = std::min(nap * 2, std::chrono::microseconds(20000));
    }
  } catch (const c10::Error& error) {
    throw RendezvousError(fmt::format("rank {} lost the store of rank 0 while the ranks were meeting: {}", rank,
                                      error.what_without_backtrace()),
                          {.rank = 0, .call = "rendezvous"});
  }
  return texts;
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<Engine> engine)
    : c10d::Backend(engine->rank(), engine->world_size()), engine_(std::move(engine)) {}

ShmBackend::~ShmBackend() = default;

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = only(tensors, "all_reduce");
  const at::Tensor dense = tensor.contiguous();
  Request request{.kind = CollectiveKind::kAllReduce,
                  .dtype = data_type(tensor.scalar_type()),
                  .op = reduction(options.reduceOp, tensor),
                  .input = dense.data_ptr(),
                  .output = dense.data_ptr(),
                  .numel = element_count(tensor),
                  .keep_alive = std::make_shared<std::pair<at::Tensor, at::Tensor>>(tensor, dense)};
  if (!dense.is_same(tensor)) request.on_finish = [tensor, dense] { tensor.copy_(dense); };
  return c10::make_intrusive<ShmWork>(engine_, engine_->post(std::move(request)), c10d::OpType::ALLREDUCE,
                                      std::vector<at::Tensor>{tensor}, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                     const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only(tensors, "broadcast");
  if (options.rootRank < 0 || options.rootRank >= size_)
    throw InvalidArgument(fmt::format("broadcast: there is no rank {} among {}", options.rootRank, size_));
  const at::Tensor dense = tensor.contiguous();
  Request request{.kind = CollectiveKind::kBroadcast,
                  .dtype = data_type(tensor.scalar_type()),
                  .root = static_cast<int>(options.rootRank),
                  .input = dense.data_ptr(),
                  .output = dense.data_ptr(),
                  .numel = element_count(tensor),
                  .keep_alive = std::make_shared<std::pair<at::Tensor, at::Tensor>>(tensor, dense)};
  if (!dense.is_same(tensor)) request.on_finish = [tensor, dense] { tensor.copy_(dense); };
  return c10::make_intrusive<ShmWork>(engine_, engine_->post(std::move(request)), c10d::OpType::BROADCAST,
                                      std::vector<at::Tensor>{tensor}, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::AllgatherOptions& options) {
  check_tensor(input, "all_gather");
  check_tensor(output, "all_gather");
  if (output.scalar_type() != input.scalar_type() || output.numel() != input.numel() * size_)
    throw InvalidArgument(fmt::format("all_gather: the output must hold {} times {} elements of {}, not {} of {}", size_,
                                      input.numel(), c10::toString(input.scalar_type()), output.numel(),
                                      c10::toString(output.scalar_type())));
  const at::Tensor target = output;
  const at::Tensor dense_in = input.contiguous();
  const at::Tensor dense_out = output.is_contiguous() ? output : at::empty(output.sizes(), output.options());
  Request request{.kind = CollectiveKind::kAllGather,
                  .dtype = data_type(input.scalar_type()),
                  .input = dense_in.data_ptr(),
                  .output = dense_out.data_ptr(),
                  .numel = element_count(input),
                  .keep_alive = std::make_shared<std::vector<at::Tensor>>(
                      std::vector<at::Tensor>{input, output, dense_in, dense_out})};
  if (!dense_out.is_same(target)) request.on_finish = [target, dense_out] { target.copy_(dense_out); };
  return c10::make_intrusive<ShmWork>(engine_, engine_->post(std::move(request)), c10d::OpType::_ALLGATHER_BASE,
                                      std::vector<at::Tensor>{target}, options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& options) {
  const at::Tensor input = only(inputs, "all_gather").contiguous();
  if (outputs.size() != 1 || outputs[0].size() != static_cast<std::size_t>(size_))
    throw InvalidArgument(fmt::format("all_gather: one list of {} outputs is needed", size_));
  for (const at::Tensor& output : outputs[0]) {
    check_tensor(output, "all_gather");
    if (output.sizes() != input.sizes() || output.scalar_type() != input.scalar_type())
      throw InvalidArgument("all_gather: every output must have the input's shape and type");
  }
  std::vector<std::int64_t> stacked_sizes{size_};
  stacked_sizes.insert(stacked_sizes.end(), input.sizes().begin(), input.sizes().end());
  const at::Tensor stacked = at::empty(stacked_sizes, input.options());
  const std::vector<at::Tensor> targets = outputs[0];
  Request request{.kind = CollectiveKind::kAllGather,
                  .dtype = data_type(input.scalar_type()),
                  .input = input.data_ptr(),
                  .output = stacked.data_ptr(),
                  .numel = element_count(input),
                  .keep_alive = std::make_shared<std::pair<at::Tensor, at::Tensor>>(input, stacked),
                  .on_finish = [stacked, targets] {
                    for (std::size_t r = 0; r < targets.size(); ++r)
                      targets[r].copy_(stacked.select(0, static_cast<std::int64_t>(r)));
                  }};
  return c10::make_intrusive<ShmWork>(engine_, engine_->post(std::move(request)), c10d::OpType::ALLGATHER, targets,
                                      options.timeout);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return c10::make_intrusive<ShmWork>(engine_, engine_->post({.kind = CollectiveKind::kBarrier}), c10d::OpType::BARRIER,
                                      std::vector<at::Tensor>{}, options.timeout);
}

at::Tensor ShmBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::int64_t numel = c10::multiply_integers(sizes);
  const auto bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  const auto options = at::TensorOptions(dtype).device(at::kCPU);
  if (bytes == 0) return at::empty(sizes, options);
  auto segment = engine_->allocate(bytes);
  void* data = segment->base[static_cast<std::size_t>(rank_)];
  return at::from_blob(data, sizes, [segment](void*) mutable { segment.reset(); }, options);
}

c10::intrusive_ptr<c10d::Backend> create_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, std::chrono::milliseconds timeout) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw InvalidArgument(fmt::format("there is no rank {} in a world of {}", rank, world_size));
  if (timeout.count() <= 0) throw InvalidArgument(fmt::format("the timeout is {} ms, but must be positive", timeout.count()));
  shm::Mapping control;
  std::string offer = host_identity();
  if (rank == 0) {
    control = shm::Mapping::create("control", shm::control_bytes(world_size));
    auto* head = new (control.data()) shm::ControlHead{shm::kLayout, static_cast<std::uint32_t>(world_size)};
    auto* blocks = reinterpret_cast<shm::RankBlock*>(control.data() + sizeof *head);
    for (int r = 0; r < world_size; ++r) new (blocks + r) shm::RankBlock;
    offer += fmt::format(" {} {}", ::getpid(), control.descriptor());
  }
  if (world_size > 1) {
    const auto offers = exchange(*store, rank, world_size, offer, timeout);
    const std::string host = offers[0].substr(0, offers[0].find(' '));
    for (int r = 1; r < world_size; ++r) {
      if (offers[static_cast<std::size_t>(r)] != host)
        throw RendezvousError(
            fmt::format("the shm backend is for ranks of one host, container and user, but rank {} is not where rank 0 "
                        "is: use --backend gloo, or set LOCAL_WORLD_SIZE to the ranks a host",
                        r),
            {.rank = r, .call = "rendezvous"});
    }
    if (rank != 0) {
      int pid = 0, fd = -1;
      if (std::sscanf(offers[0].c_str() + host.size(), " %d %d", &pid, &fd) != 2)
        throw RendezvousError("rank 0 offered no shared memory: it runs another version of ddpkit", {.rank = 0});
      control = shm::Mapping::open(pid, fd, shm::control_bytes(world_size));
      const auto* head = reinterpret_cast<const shm::ControlHead*>(control.data());
      if (head->layout != shm::kLayout || head->world_size != static_cast<std::uint32_t>(world_size))
        throw RendezvousError("rank 0 runs another version of ddpkit, or another world size", {.rank = 0});
    }
  }
  return c10::make_intrusive<ShmBackend>(std::make_shared<Engine>(std::move(control), rank, world_size, timeout));
}

}  // namespace ddpkit
