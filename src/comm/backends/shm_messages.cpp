// send() and recv() of the shm backend.
#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_backend.h"
#include "comm/backends/shm_work.h"

namespace ddpkit {

using c10d::OpType;
using shm::Message;

namespace {

std::shared_ptr<Message> message_of(Message::Kind kind, int peer, int tag, const at::Tensor& dense) {
  auto message = std::make_shared<Message>();
  message->kind = kind;
  message->peer = peer;
  message->tag = tag;
  message->dtype = data_type(dense);
  message->numel = element_count(dense);
  message->data = static_cast<std::byte*>(dense.data_ptr());
  return message;
}

}  // namespace

void ShmBackend::check_peer(int peer, int tag, const char* call) const {
  check_root(peer, size_, call);
  if (peer == rank_) throw InvalidArgument(fmt::format("{}: rank {} cannot exchange messages with itself", call, peer));
  if (tag < 0) throw InvalidArgument(fmt::format("{}: the tag is {}, but must not be negative", call, tag));
}

ShmBackend::WorkPtr ShmBackend::start(shm::MessageHandle message, OpType type, const at::Tensor& tensor) const {
  auto work = c10::make_intrusive<ShmWork>(engine_, type, Tensors{tensor}, c10d::kUnsetTimeout, tensor);
  work->add(engine_->post(std::move(message)));
  return work;
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor tensor = only(tensors, "send");
  check_peer(destination, tag, "send");
  const at::Tensor dense = tensor.contiguous();
  auto message = message_of(Message::Kind::kSend, destination, tag, dense);
  message->keep_alive = std::make_shared<at::Tensor>(dense);
  return start(std::move(message), OpType::SEND, tensor);
}

ShmBackend::WorkPtr ShmBackend::receive(Tensors& tensors, int source, int tag, OpType type) {
  const at::Tensor tensor = only(tensors, "recv");
  Outputs outputs("recv");
  auto message = message_of(Message::Kind::kReceive, source, tag, outputs.add(tensor));
  outputs.attach_to(*message);
  return start(std::move(message), type, tensor);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  check_peer(source, tag, "recv");
  return receive(tensors, source, tag, OpType::RECV);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  if (tag < 0) throw InvalidArgument(fmt::format("recv: the tag is {}, but must not be negative", tag));
  if (size_ == 1) throw InvalidArgument("recv: there is no other rank to receive from");
  return receive(tensors, shm::kAnySource, tag, OpType::RECVANYSOURCE);
}

}  // namespace ddpkit
