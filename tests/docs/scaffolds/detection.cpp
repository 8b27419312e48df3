// At namespace scope: a type with a function that finds its tensors.

// The block.

void run(ddpkit::ProcessGroup) {
  std::vector<at::Tensor> tensors;
  const bool known = ddpkit::collect_tensors(Detection{torch::ones({2, 4}), torch::ones({2})}, tensors);
  ddpkit::docs::require(known && tensors.size() == 2, "both tensors are found");
}
