// A program outside ddpkit. Wraps a custom module and a torch::nn::Sequential. Trains both for some steps on data that
// differs between ranks, with and without a custom hook, and checks that the ranks agree bitwise. Then trains two
// replicas in one process.
#include <torch/torch.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include <ddpkit/ddpkit.h>

static_assert(DDPKIT_VERSION >= 100);

namespace {

struct Net : torch::nn::Module {
  Net() : in(register_module("in", torch::nn::Linear(6, 16))), out(register_module("out", torch::nn::Linear(16, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::tanh(in(x))); }
  torch::nn::Linear in, out;
};

// Throws unless all ranks hold the same bits and the steps changed them.
template <class M>
void train(const std::shared_ptr<M>& model, const ddpkit::ProcessGroup& group, bool by_hook = false) {
  model->to(group.device());
  ddpkit::DistributedDataParallel ddp(model, group);
  std::atomic<int> buckets = 0;
  if (by_hook) {
    ddp.register_comm_hook([&](ddpkit::GradBucket& bucket) -> ddpkit::BucketReduction {
      ++buckets;
      return {.work = group.all_reduce_async(bucket.buffer.clamp_(-1, 1), ddpkit::ReduceOp::kAvg)};
    });
  }
  const auto before = model->parameters()[0].detach().clone();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 5; ++step) {
    const auto data = torch::randn({8, 6}).to(group.device());
    const auto target = torch::randint(3, {8}).to(group.device());
    optimizer.zero_grad();
    torch::cross_entropy_loss(ddp(data), target).backward();
    optimizer.step();
  }
  if (by_hook && buckets < 5) throw std::runtime_error("five steps called the hook less than five times");
  if (torch::equal(before, model->parameters()[0])) throw std::runtime_error("five steps changed nothing");
  for (const auto& parameter : model->named_parameters()) {
    const auto all = group.all_gather(parameter.value().detach());
    for (int rank = 1; rank < group.world_size(); ++rank)
      if (!torch::equal(all[0], all[rank]))
        throw std::runtime_error(parameter.key() + " of rank " + std::to_string(rank) + " differs from rank 0's");
  }
}

// Checks that the gradient of two replicas equals that of the module on the whole batch.
void check_replicas() {
  torch::nn::Sequential model(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  const torch::data::Example<> batch{torch::randn({8, 6}), torch::randint(3, {8}, torch::kLong)};
  torch::cross_entropy_loss(model->forward(batch.data), batch.target).backward();
  const auto expected = model->parameters()[0].grad().clone();
  model->zero_grad();
  ddpkit::DataParallel dp(model, {.replicas = 2});
  dp.train_step(batch, [](torch::nn::SequentialImpl& replica, const torch::data::Example<>& part) {
    return torch::cross_entropy_loss(replica.forward(part.data), part.target);
  });
  if (!torch::allclose(model->parameters()[0].grad(), expected, 1e-5, 1e-6))
    throw std::runtime_error("two replicas have another gradient than the module alone");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw std::runtime_error("give the number of ranks that must be there");
    const auto group = ddpkit::init_process_group();
    if (group.world_size() != std::atoi(argv[1]))
      throw std::runtime_error("expected " + std::string(argv[1]) + " ranks, there are " +
                               std::to_string(group.world_size()));
    torch::manual_seed(1 + group.rank());
    train(std::make_shared<Net>(), group);
    train(torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 3)).ptr(), group);
    train(std::make_shared<Net>(), group, /*by_hook=*/true);
    if (group.device().is_cpu()) check_replicas();
    if (group.rank() == 0) std::printf("%d ranks agree\n", group.world_size());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "outside: %s\n", error.what());
    return 1;
  }
}
