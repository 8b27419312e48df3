# The model and optimizer of the state dict run.pt, which the page's C++ has written.
import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
before = model[0].weight.detach().clone()
# The block.
assert run["epoch"] == 3 and not torch.equal(before, model[0].weight)
assert optimizer.state_dict()["state"][0]["step"] > 0
