// The folder holds a file labels.txt.
void run(ddpkit::ProcessGroup group) {
  if (group.rank() == 0) std::ofstream("labels.txt") << "walk\n";
  group.barrier();
  {
    // The block.
  }
  bool refused = false;
  try {
    ddpkit::train::run_together(group, [&] {
      if (group.rank() == group.world_size() - 1) throw ddpkit::InvalidArgument("labels.txt cannot be opened");
    });
  } catch (const ddpkit::InvalidArgument&) {
    refused = true;
  }
  ddpkit::docs::require(refused, "what fails on one rank is thrown on all");
}
