// Messages under many schedules.
#include "explore.h"
#include "support/catch.h"

using namespace ddpkit::schedules;
using ddpkit::shm::CollectiveKind;
using ddpkit::shm::kAnySource;
using ddpkit::shm::kChannelBytes;
using ddpkit::shm::Message;
using ddpkit::shm::MessageHandle;

namespace {

/// Rank `from` sends `times` messages of `numel` values to rank `to`, which receives them in the order of their tags.
void send_all(ScenarioRank& rank, int from, int to, int times, std::size_t numel) {
  std::vector<Values> data(static_cast<std::size_t>(times));
  std::vector<MessageHandle> messages;
  for (int i = 0; i < times; ++i) {
    Values& values = data[static_cast<std::size_t>(i)];
    values = rank.rank == from ? ScenarioRank::values(from, i, numel) : Values(numel);
    if (rank.rank == from) messages.push_back(rank.engine->post(message(Message::Kind::kSend, to, i % 2, values)));
    if (rank.rank == to) messages.push_back(rank.engine->post(message(Message::Kind::kReceive, from, i % 2, values)));
  }
  for (std::size_t i = messages.size(); i-- > 0;) rank.engine->wait(messages[i]);
  for (int i = 0; i < times && rank.rank == to; ++i)
    rank.check(data[static_cast<std::size_t>(i)] == ScenarioRank::values(from, i, numel), "a message has wrong values");
}

}  // namespace

TEST_CASE("schedules: every schedule of a message with two deviations", "[schedules]") {
  explore_all("a message", {.body = [](ScenarioRank& rank) { send_all(rank, 0, 1, 1, 3); }}, 2);
}

TEST_CASE("schedules: messages in both directions", "[schedules]") {
  explore("2 ranks", {.body =
                          [](ScenarioRank& rank) {
                            Values out = ScenarioRank::values(rank.rank, 0, 7), in(7);
                            const int peer = 1 - rank.rank;
                            const auto sent = rank.engine->post(message(Message::Kind::kSend, peer, 3, out));
                            const auto received = rank.engine->post(message(Message::Kind::kReceive, peer, 3, in));
                            rank.engine->wait(received);
                            rank.engine->wait(sent);
                            rank.check(in == ScenarioRank::values(peer, 0, 7), "a message has wrong values");
                            send_all(rank, 0, 1, 4, 2);
                            send_all(rank, 1, 0, 4, 2);
                          },
                      .schedules = 2000});
}

TEST_CASE("schedules: messages wrap around the end of their channel", "[schedules]") {
  // Together twice the channel's size, and no message ends at the channel's end: the sender waits for the receiver.
  constexpr std::size_t kValues = kChannelBytes / sizeof(std::int64_t) / 3 + 11;
  explore("2 ranks", {.body = [](ScenarioRank& rank) { send_all(rank, 0, 1, 6, kValues); }, .schedules = 300});
}

TEST_CASE("schedules: messages from any rank", "[schedules]") {
  explore("3 ranks",
          {.ranks = 3,
           .body =
               [](ScenarioRank& rank) {
                 if (rank.rank != 0) {
                   Values out = ScenarioRank::values(rank.rank, 0, 5);
                   rank.engine->wait(rank.engine->post(message(Message::Kind::kSend, 0, 1, out)));
                   return;
                 }
                 int from = 0;
                 for (int i = 0; i < 2; ++i) {
                   Values in(5);
                   const auto received = rank.engine->post(message(Message::Kind::kReceive, kAnySource, 1, in));
                   rank.engine->wait(received);
                   rank.check(in == ScenarioRank::values(received->peer, 0, 5), "a message has wrong values");
                   from += received->peer;
                 }
                 rank.check(from == 3, "both messages came from one rank");
               },
           .schedules = 2000});
}

TEST_CASE("schedules: messages and collectives together", "[schedules]") {
  explore("3 ranks", {.ranks = 3,
                      .body =
                          [](ScenarioRank& rank) {
                            Values out = ScenarioRank::values(rank.rank, 0, 3), in(3), sum = out;
                            const int next = (rank.rank + 1) % 3, before = (rank.rank + 2) % 3;
                            const auto received = rank.engine->post(message(Message::Kind::kReceive, before, 0, in));
                            const auto reduced = rank.engine->post({.kind = CollectiveKind::kAllReduce,
                                                                    .dtype = DataType::kInt64,
                                                                    .input = sum.data(),
                                                                    .output = sum.data(),
                                                                    .numel = 3});
                            const auto sent = rank.engine->post(message(Message::Kind::kSend, next, 0, out));
                            rank.engine->wait(reduced);
                            rank.engine->wait(received);
                            rank.engine->wait(sent);
                            rank.check(in == ScenarioRank::values(before, 0, 3), "a message has wrong values");
                            rank.check(sum == rank.sum(0, 3), "a collective gave a wrong result");
                          },
                      .schedules = 1500});
}
