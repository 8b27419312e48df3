#include "comm/store/keyed_store.h"

#include <signal.h>
#include <sys/wait.h>

#include <future>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddpkit/error.h>

#include "store_door.h"
#include "support/folder.h"
#include "support/port.h"

using namespace ddpkit::testing;
using ddpkit::RendezvousError;
using ddpkit::store::KeyedStore;
using std::chrono::milliseconds;

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

/// The calls of c10d's process groups, with the results of c10d's TCPStore.
void check_operations(c10d::Store& store) {
  store.set("a", bytes("1"));
  CHECK(store.get("a") == bytes("1"));
  store.set("a", Bytes());
  CHECK(store.get("a").empty());
  CHECK(store.add("n", 5) == 5);
  CHECK(store.add("n", -7) == -2);
  CHECK(store.get("n") == bytes("-2"));
  CHECK(store.check({"a", "n"}));
  CHECK(!store.check({"a", "absent"}));
  CHECK(store.compareSet("c", Bytes(), bytes("x")) == bytes("x"));
  CHECK(store.compareSet("c", bytes("y"), bytes("z")) == bytes("x"));
  CHECK(store.compareSet("c", bytes("x"), bytes("z")) == bytes("z"));
  CHECK(store.compareSet("absent", bytes("y"), bytes("z")) == bytes("y"));
  CHECK(!store.check({"absent"}));
  store.append("p", bytes("ab"));
  store.append("p", bytes("cd"));
  CHECK(store.get("p") == bytes("abcd"));
  store.multiSet({"m1", "m2"}, {bytes("1"), bytes(std::string("\0\n", 2))});
  CHECK(store.multiGet({"m2", "m1"}) == std::vector<Bytes>{bytes(std::string("\0\n", 2)), bytes("1")});
  CHECK(store.deleteKey("m1"));
  CHECK(!store.deleteKey("m1"));
  CHECK(store.hasExtendedApi());
  store.wait({"a", "c", "m2"});
  const auto other = store.clone();
  other->set("b", bytes("2"));
  CHECK(store.get("b") == bytes("2"));
}

}  // namespace

TEST_CASE("a wait for a key of the keyed store ends without an error", "[store]") {
  const ServedStore served;
  const auto store = served.join();
  CHECK(!store->exists_within("a", milliseconds(20)));
  store->set("a", bytes("1"));
  CHECK(store->exists_within("a", milliseconds(0)));
}

TEST_CASE("the keyed store has the operations of c10d's TCPStore", "[store]") {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  c10d::TCPStore plain("127.0.0.1", options);
  check_operations(plain);

  const ServedStore served;
  const auto keyed = served.join();
  check_operations(*keyed);
  CHECK(keyed->getNumKeys() == 6);
  c10d::PrefixStore prefixed("prefix", served.join());
  check_operations(prefixed);
  CHECK(keyed->getNumKeys() == 12);
  const Bytes large(5'000'000, 7);
  keyed->set("large", large);
  CHECK(prefixed.getUnderlyingNonPrefixStore()->get("large") == large);
}

TEST_CASE("a wait of the keyed store that times out names the keys", "[store]") {
  const ServedStore served;
  const auto client = served.join(milliseconds(200));
  CHECK_THROWS_AS(client->get("absent"), c10::DistStoreError);
  CHECK_THROWS_WITH(client->get("absent"), ContainsSubstring("nobody has set \"absent\" within 0.2 s"));
  client->set("a", bytes("1"));
  CHECK_THROWS_WITH(client->wait({"a", "b", "c"}, milliseconds(100)),
                    ContainsSubstring("nobody has set \"b\" and 1 more keys within 0.1 s"));
  client->setTimeout(kStoreLimit);
  CHECK(client->get("a") == bytes("1"));
}

TEST_CASE("clients of the keyed store wait at the same time", "[store]") {
  const ServedStore served;
  const auto setter = served.join();
  std::vector<std::future<std::string>> waits;
  for (int i = 0; i < 8; ++i)
    waits.push_back(std::async(std::launch::async, [&, i] {
      const auto client = served.join();
      client->add("waiting", 1);
      client->wait({"first/" + std::to_string(i), "all"}, milliseconds(0));
      return client->get_to_str("all") + client->get_to_str("first/" + std::to_string(i));
    }));
  while (setter->add("waiting", 0) < 8) std::this_thread::sleep_for(milliseconds(1));
  for (int i = 0; i < 8; ++i) setter->set("first/" + std::to_string(i), bytes(std::to_string(i)));
  setter->set("all", bytes("done"));
  for (int i = 0; i < 8; ++i) CHECK(waits[static_cast<std::size_t>(i)].get() == "done" + std::to_string(i));
}

TEST_CASE("additions of several clients to one key are all counted", "[store]") {
  const ServedStore served;
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i)
    clients.emplace_back([&] {
      const auto client = served.join();
      for (int call = 0; call < 200; ++call) client->add("sum", 1);
    });
  for (std::thread& client : clients) client.join();
  CHECK(served.join()->add("sum", 0) == 800);
}

TEST_CASE("the keyed store names a value that is too large", "[store]") {
  const ServedStore served;
  const auto client = served.join();
  const Bytes largest(ddpkit::store::StoreLimits{}.value_bytes, 1);
  Bytes more = largest;
  more.push_back(1);
  CHECK_THROWS_WITH(client->set("big", more),
                    ContainsSubstring("the value of \"big\" has 67108865 bytes; the store accepts at most 67108864"));
  client->set("big", largest);
  CHECK(client->get("big") == largest);
  CHECK_THROWS_WITH(client->append("big", bytes("x")), ContainsSubstring("the value of \"big\" has 67108865 bytes"));
  CHECK_THROWS_WITH(client->multiGet({"big", "big"}), ContainsSubstring("get fewer keys per call"));
  CHECK_THROWS_WITH(client->multiSet({"a", "b"}, {largest, largest}), ContainsSubstring("set fewer values per call"));
  CHECK(client->getNumKeys() == 1);
}

TEST_CASE("a full store refuses values and keeps the others", "[store]") {
  const ServedStore served({.value_bytes = 500, .total_bytes = 2000});
  const auto client = served.join();
  client->set("a", Bytes(500, 1));
  client->set("a", Bytes(400, 1));
  client->set("b", Bytes(500, 2));
  client->set("c", Bytes(500, 3));
  CHECK_THROWS_WITH(client->set("d", Bytes(500, 4)),
                    ContainsSubstring("the store is full") && ContainsSubstring("\"d\""));
  CHECK_THROWS_WITH(client->set("d", Bytes(501, 4)), ContainsSubstring("at most 500"));
  CHECK(client->get("b") == Bytes(500, 2));
  CHECK(client->deleteKey("b"));
  client->set("d", Bytes(500, 4));
  client->set("text", bytes("word"));
  CHECK_THROWS_WITH(client->add("text", 1), ContainsSubstring("the value of \"text\" is not a whole number"));
}

TEST_CASE("a process of another run cannot join the store", "[store]") {
  const ServedStore served;
  ddpkit::store::StorePlace place = served.place();
  place.key[31] ^= 1;
  CHECK_THROWS_AS(KeyedStore(place, kStoreLimit), RendezvousError);
  CHECK_THROWS_WITH(KeyedStore(place, kStoreLimit),
                    ContainsSubstring("the store at " + place.name + " refuses this process: its key is not"));
  place = served.place();
  place.run = "local-1/1";
  CHECK_THROWS_WITH(KeyedStore(place, kStoreLimit), ContainsSubstring("it belongs to the run \"local-1/1\""));
  CHECK(served.join()->getNumKeys() == 0);
}

TEST_CASE("a program that has the port and not the key is no store", "[store]") {
  const ServedStore served, foreign;
  ddpkit::store::StorePlace place = served.place();
  place.address = foreign.place().address;
  CHECK_THROWS_WITH(KeyedStore(place, kStoreLimit), ContainsSubstring("refuses this process"));
  // It welcomes everybody, but has no proof.
  int listener = -1;
  const std::uint16_t port = ddpkit::listen_on("127.0.0.1", listener).value();
  place.address = loopback(port);
  std::thread liar([&] {
    pollfd waiting{listener, POLLIN, 0};
    ::poll(&waiting, 1, 60000);
    const int fd = ::accept(listener, nullptr, nullptr);
    char buffer[4096];
    ::recv(fd, buffer, ddpkit::store::kHelloBytes, MSG_WAITALL);
    ::send(fd, buffer, 32, 0);
    ::recv(fd, buffer, ddpkit::store::kProofBytes, MSG_WAITALL);
    buffer[0] = static_cast<char>(ddpkit::store::Verdict::kWelcome);
    ::send(fd, buffer, ddpkit::store::kVerdictBytes, 0);
    ::close(fd);
  });
  CHECK_THROWS_WITH(KeyedStore(place, kStoreLimit), ContainsSubstring("does not have the key of this run"));
  liar.join();
  ::close(listener);
  const TakenPort silent;
  place.address = loopback(silent.port());
  CHECK_THROWS_WITH(KeyedStore(place, milliseconds(200)), ContainsSubstring("did not succeed within 0.2 s"));
}

TEST_CASE("the store survives clients that are killed", "[store]") {
  int go[2];
  REQUIRE(::pipe(go) == 0);
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {  // Forked before the server starts its thread.
    const pid_t child = ::fork();
    if (child == 0) {
      std::array<char, 2 + 32> message{};
      if (::read(go[0], message.data(), message.size()) != static_cast<ssize_t>(message.size())) ::_exit(1);
      std::uint16_t port = 0;
      std::memcpy(&port, message.data(), 2);
      const ddpkit::store::StorePlace place{.address = loopback(port),
                                            .name = "killed",
                                            .key = ddpkit::store::digest_of({message.data() + 2, 32}),
                                            .run = "local-1/0"};
      KeyedStore store(place, kStoreLimit);
      store.add("children", 1);
      if (i % 2 == 0) store.wait({"never"}, milliseconds(0));
      for (;;) store.set("big", Bytes(1'000'000, 1));
    }
    children.push_back(child);
  }
  const ServedStore served;
  const auto client = served.join();
  for (std::size_t i = 0; i < children.size(); ++i) {
    std::array<char, 2 + 32> message{};
    const std::uint16_t port = served.port();
    std::memcpy(message.data(), &port, 2);
    std::memcpy(message.data() + 2, served.key.data(), 32);
    REQUIRE(::write(go[1], message.data(), message.size()) == static_cast<ssize_t>(message.size()));
  }
  while (client->add("children", 0) < 4) std::this_thread::sleep_for(milliseconds(1));
  for (const pid_t child : children) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    CHECK(client->add("killed", 1) > 0);
  }
  CHECK(client->add("killed", 0) == 4);
  client->set("never", bytes("1"));
  CHECK(served.join()->get("never") == bytes("1"));
}

TEST_CASE("calls to a store that has ended fail and name it", "[store]") {
  ServedStore served;
  const auto client = served.join();
  auto waiting = std::async(std::launch::async, [&, other = client->clone()] { other->get("never"); });
  client->set("a", bytes("1"));
  served.end();
  const std::string lost = "the connection to the store at " + served.place().name + " is lost";
  CHECK_THROWS_WITH(waiting.get(), ContainsSubstring(lost));
  CHECK_THROWS_WITH(client->get("a"), ContainsSubstring(lost));
  CHECK_THROWS_AS(client->get("a"), c10::DistNetworkError);
}
