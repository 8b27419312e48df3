// The extension module of the Python package ddpkit_torch: creates the shm backend for torch.distributed.
#include <ddpkit/comm/shm_backend.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

PYBIND11_MODULE(_backend, module) {
  module.def(
      "create_shm_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, std::chrono::milliseconds timeout) {
        return ddpkit::create_shm_backend(store, rank, world_size, timeout);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
