#include "har/options.h"

namespace har {

void declare(ddpkit::train::Options& options, TrainOptions& har) {
  options.section("data");
  options
      .add("data", &har.data,
           "Folder in the UCI-HAR layout, or with NAME_TRAIN.ts and NAME_TEST.ts; by default data/har, generated")
      .may_differ();
  options.section("model");
  options.add("mode", &har.mode, {{"cnn", Mode::kCnn}, {"flatten", Mode::kFlatten}, {"lstm", Mode::kLstm}},
              "cnn, lstm or flatten (a perceptron on flattened windows)");
  options.add("dropout", &har.dropout, "Dropout probability").between(0, 0.95);
  options.section("training");
  options.add("optimizer", &har.optimizer, "adamw, adam or sgd").one_of({"adam", "adamw", "sgd"});
  options.add("momentum", &har.momentum, "Momentum of sgd").between(0, 1);
  ddpkit::train::declare(options, har.run);
  options.remove({"max_grad_norm", "num_gpus", "sync_batchnorm", "logging_steps"});
  options.section("distributed");
  options
      .add("multi_gpu", &har.multi_gpu,
           {{"none", MultiGpu::kNone},
            {"dp", MultiGpu::kDp},
            {"ddp", MultiGpu::kDdp},
            {"libtorch-dp", MultiGpu::kLibTorchDp}},
           "none: one device; dp: one process, one replica per device; ddp: one rank per device; libtorch-dp: "
           "LibTorch's data_parallel on GPUs, for comparison")
      .may_differ();
  options.add("gpu_ids", &har.gpu_ids, "GPUs to use, such as 0,1,3; by default all").between(0, 1023).may_differ();
  options.add("replicas", &har.replicas, "CPU replicas of --multi-gpu dp; by default one per core")
      .between(1, 1e6)
      .may_differ();
}

}  // namespace har
