// At namespace scope: a type with a function by which DataParallel splits it.

// The block.

void run(ddpkit::ProcessGroup) {
  const Utterances batch{torch::ones({4, 3}), torch::ones({4})};
  ddpkit::docs::require(ddpkit::tree_leaves(batch).size() == 2, "both tensors are found");
  const auto half = ddpkit::tree_map(batch, [](const at::Tensor& tensor) { return tensor.narrow(0, 0, 2); });
  ddpkit::docs::require(half.frames.size(0) == 2 && half.lengths.size(0) == 2, "both are cut");
}
