#include "gpt/options.h"

namespace gpt {

void declare(ddpkit::train::Options& options, TrainOptions& gpt) {
  options.section("data");
  options.add("data", &gpt.data, "A text file, or a folder of text files").may_differ();
  options.section("model");
  options.add("layers", &gpt.layers, "Blocks").between(1, 1000);
  options.add("width", &gpt.width, "Channels; a multiple of heads").between(1, 1 << 16);
  options.add("heads", &gpt.heads, "Attention heads").between(1, 1 << 10);
  options.add("context", &gpt.context, "Characters that the model sees").between(1, 1 << 16);
  options.add("dropout", &gpt.dropout, "Dropout probability").between(0, 0.95);
  ddpkit::train::declare(options, gpt.run);
  options.remove({"grad_accum_steps", "sync_batchnorm", "logging_steps", "num_workers"});
  options.section("distributed");
  options
      .add("sharding", &gpt.sharding,
           {{"none", Sharding::kNone}, {"zero2", Sharding::kZero2}, {"fsdp", Sharding::kFsdp}},
           "none: each rank has everything; zero2: a shard of gradients and optimizer state; fsdp: a shard of the "
           "weights too")
      .may_differ();
  options
      .add("activation_checkpointing", &gpt.activation_checkpointing,
           "Compute activations again in backward instead of keeping them")
      .may_differ();
  options.section("run");
  options.add("prompt", &gpt.prompt, "Start of the text that is written after the training").may_differ();
  options.add("characters", &gpt.characters, "Length of this text; 0: none").between(0, 1e6).may_differ();
  options.add("temperature", &gpt.temperature, "Randomness of this text; 0: the most probable characters")
      .between(0, 100)
      .may_differ();
}

}  // namespace gpt
