#include "asr/options.h"

namespace asr {
namespace {

void declare_model(ddpkit::train::Options& options, Options& asr) {
  FeatureOptions& features = asr.features;
  ModelOptions& model = asr.model;
  options.section("features");
  options.add("sample_rate", &features.sample_rate, "Sample rate in Hz").between(1000, 1e6);
  options.add("window_ms", &features.window_ms, "Length of a frame").between(1, 1000);
  options.add("hop_ms", &features.hop_ms, "Time from frame to frame").between(1, 1000);
  options.add("mels", &features.mels, "Bands per frame").between(1, 1000);
  options.section("model");
  options.add("width", &model.width, "Width of each layer").between(1, 65536);
  options.add("kernel", &model.kernel, "Kernel size of a convolution, in frames").between(1, 1000);
  options.add("strides", &model.strides, "One convolution per stride").between(1, 100);
  options.add("batch_norm", &model.batch_norm, "Batch norm after each convolution");
  options.add("layers", &model.layers, "LMU layers").between(1, 1000);
  options.add("memory_channels", &model.memory_channels, "Channels of an LMU's memory").between(1, 65536);
  options.add("order", &model.order, "Order of the Legendre polynomials").between(1, 512);
  options.add("theta", &model.theta, "Length of the memory, in steps after the convolutions").between(1, 1e6);
  options.add("dropout", &model.dropout, "Dropout probability").between(0, 0.95);
}

void declare_spec_augment(ddpkit::train::Options& options, Options& asr) {
  SpecAugmentOptions& spec = asr.spec;
  options.section("training");
  options.add("spec_augment.enabled", &asr.spec_augment, "SpecAugment");
  options.add("spec_augment.time_masks", &spec.time_masks, "Masks over time").between(0, 1000);
  options.add("spec_augment.time_width", &spec.time_width, "Widest mask, in frames").between(0, 1e6);
  options.add("spec_augment.time_share", &spec.time_share, "Widest mask, as a share of the utterance").between(0, 1);
  options.add("spec_augment.frequency_masks", &spec.frequency_masks, "Masks over bands").between(0, 1000);
  options.add("spec_augment.frequency_width", &spec.frequency_width, "Widest mask, in bands").between(0, 1000);
}

}  // namespace

void declare(ddpkit::train::Options& options, Options& asr) {
  DataOptions& data = asr.data;
  options.section("data");
  options.add("train", &data.train, "Training set: a manifest, or a folder in LibriSpeech's layout");
  options.add("dev", &data.dev, "Set of the error rates during training").may_differ();
  options.add("test", &data.test, "Set of `asr evaluate`").may_differ();
  options.add("include", &data.include, "Only utterances whose names begin with one of these prefixes");
  options
      .add("on_bad_data", &data.on_bad_data, {{"stop", FaultPolicy::kStop}, {"skip", FaultPolicy::kSkip}},
           "stop at the first bad recording, or skip bad recordings and count them")
      .also("on_error")
      .may_differ();
  options.add("cache_mb", &data.cache_mb, "MiB of features that each rank caches").between(0, 1e7).may_differ();
  declare_model(options, asr);
  ddpkit::train::declare(options, asr.run);
  options.remove({"grad_accum_steps"});
  options.at("batch_size").help("Utterances per update, over all ranks");
  declare_spec_augment(options, asr);
  options.section("distributed");
  options.add("enabled", &asr.distributed, "Accept several ranks").may_differ();
  options.add("find_unused_parameters", &asr.find_unused_parameters, "Parameters may have no gradient").may_differ();
  options.add("arena_mb", &asr.arena_mb, "MiB of a rank's tensors in shared memory").between(0, 1e7);
  EvaluationOptions& evaluation = asr.evaluation;
  options.section("evaluation");
  options.add("batch_size", &evaluation.batch_size, "Utterances per batch on each rank").at_least(1).may_differ();
  options.add("eval_every", &evaluation.eval_every, "Evaluate the dev set after every N epochs, and after the last")
      .at_least(1)
      .also("every_epochs")
      .may_differ();
  options.add("decoder", &evaluation.decoder, "greedy or beam").one_of({"greedy", "beam"}).may_differ();
  options.add("beam", &evaluation.beam, "Hypotheses in the beam").between(1, 10'000).may_differ();
  options.add("samples", &evaluation.samples, "Transcripts to print").between(0, 1000).may_differ();
}

ModelOptions model_options(const Options& options) {
  if (options.model.strides.empty())
    throw ddpkit::train::UsageError("model.strides is empty: give at least one convolution");
  ModelOptions model = options.model;
  model.mels = options.features.mels;
  model.labels = Alphabet().size();
  return model;
}

}  // namespace asr
