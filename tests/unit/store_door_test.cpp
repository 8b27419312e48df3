// What a stranger, or a client that breaks the protocol, gets from the keyed store.
#include "store_door.h"

#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include <ddpkit/parse_number.h>

using namespace ddpkit::testing;
using namespace ddpkit::store;
using Clock = std::chrono::steady_clock;

TEST_CASE("a stranger cannot read, write or join", "[store]") {
  const ServedStore served;
  const auto rank = served.join();
  rank->set("secret", "value");
  const Digest wrong = random_digest();

  const std::string request = Writer(Operation::kGet).number(0).text("secret").finish();
  SECTION("without a handshake") {
    const RawClient stranger(served);
    CHECK(stranger.send(request));
    CHECK(stranger.receive(1).empty());
  }
  SECTION("as a client of TCPStore") {
    const RawClient stranger(served);
    CHECK(stranger.send(std::string("\x00\xce\xf7\x85\x3c", 5)));
    CHECK(stranger.receive(1).empty());
  }
  SECTION("with a wrong key") {
    RawClient stranger(served);
    CHECK(stranger.send(stranger.hello()));
    CHECK(stranger.send(stranger.proof(wrong, served.run)));
    const std::string verdict = stranger.receive(kVerdictBytes + 1);
    CHECK(verdict == std::string(1, static_cast<char>(Verdict::kWrongKey)) + std::string(32, '\0'));
  }
  SECTION("with a wrong key, without waiting for the verdict") {
    RawClient stranger(served);
    CHECK(stranger.send(stranger.hello()));
    CHECK(stranger.send(stranger.proof(wrong, served.run) + stranger.to_server->seal(add_one("written"))));
    CHECK(stranger.receive(kVerdictBytes + 1).size() <= kVerdictBytes);
  }
  SECTION("with the server's proof as its own") {
    RawClient first(served), second(served);
    CHECK(first.send(first.hello()));
    first.session.server = digest_of(first.receive(32));
    // The server proves nothing to a client that has not proved the key, so nothing can be reflected.
    CHECK(second.send(std::string(kMagic).append(bytes_of(first.session.server))));
    CHECK(second.receive(32).size() == 32);
    CHECK(!second.is_readable(std::chrono::milliseconds(50)));
  }
  SECTION("with the proof of another connection") {
    RawClient first(served), second(served);
    CHECK(first.send(first.hello()));
    const std::string proof = first.proof(served.key, served.run);
    CHECK(second.send(std::string(kMagic).append(bytes_of(first.session.client))));
    CHECK(second.receive(32).size() == 32);
    CHECK(second.send(proof));
    CHECK(second.receive(1) == std::string(1, static_cast<char>(Verdict::kWrongKey)));
  }
  SECTION("with the right key and another run") {
    RawClient old(served);
    CHECK(old.send(old.hello()));
    CHECK(old.send(old.proof(served.key, "local-1/1")));
    CHECK(old.receive(kVerdictBytes + 1).front() == static_cast<char>(Verdict::kWrongRun));
    CHECK(old.is_closed());
  }
  CHECK(rank->getNumKeys() == 1);
  CHECK(rank->get_to_str("secret") == "value");
}

TEST_CASE("strangers who stay cannot keep ranks out", "[store]") {
  const ServedStore served;
  std::vector<std::unique_ptr<RawClient>> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(std::make_unique<RawClient>(served));
    if (i % 2 == 0) strangers.back()->send(strangers.back()->hello());
    if (i % 3 == 0) strangers.back()->send(std::string(kMagic.substr(0, 3)));
  }
  const auto rank = served.join();
  rank->set("a", "1");
  CHECK(rank->get_to_str("a") == "1");
  for (const auto& stranger : strangers) CHECK(stranger->is_closed());
  CHECK(rank->get_to_str("a") == "1");
}

TEST_CASE("a stranger who never ends its first message is closed", "[store]") {
  const ServedStore served;
  const RawClient stranger(served);
  const std::string endless(std::string(kMagic) + std::string(1 << 20, 'x'));
  bool is_open = true;
  for (int i = 0; i < 64 && is_open; ++i) is_open = stranger.send(endless);
  CHECK(!is_open);
  CHECK(served.join()->getNumKeys() == 0);
}

TEST_CASE("frames that are repeated, reordered, cut or foreign are refused", "[store]") {
  const ServedStore served;
  const auto rank = served.join();
  RawClient client(served);
  client.join(served);
  REQUIRE(client.send(client.to_server->seal(add_one("sum"))));
  CHECK(client.reply() == Writer(Status::kOk).number(1).finish());

  SECTION("repeated") {
    const std::string frame = client.to_server->seal(add_one("sum"));
    REQUIRE(client.send(frame));
    CHECK(!client.reply().empty());
    client.send(frame);
    CHECK(client.reply().empty());
    CHECK(rank->add("sum", 0) == 2);
  }
  SECTION("reordered") {
    const std::string second = client.to_server->seal(add_one("sum")), third = client.to_server->seal(add_one("sum"));
    client.send(third);
    client.send(second);
    CHECK(client.reply().empty());
    CHECK(rank->add("sum", 0) == 1);
  }
  SECTION("cut by the end of the connection") {
    client.send(client.to_server->seal(add_one("sum")).substr(0, 20));
    client.end_sending();
    CHECK(client.is_closed());
    CHECK(rank->add("sum", 0) == 1);
  }
  SECTION("cut, and continued by the next") {
    const std::string next = client.to_server->seal(add_one("sum"));
    client.send(next.substr(0, next.size() - 4) + next.substr(0, 4));
    CHECK(client.reply().empty());
    CHECK(rank->add("sum", 0) == 1);
  }
  SECTION("of another connection") {
    RawClient other(served);
    other.join(served);
    client.send(other.to_server->seal(add_one("sum")));
    CHECK(client.reply().empty());
    CHECK(rank->add("sum", 0) == 1);
  }
  SECTION("of the other direction") {
    Direction to_client = Direction::to_client(Hmac(bytes_of(served.key)), client.session);
    to_client.seal("");
    client.send(to_client.seal(add_one("sum")));
    CHECK(client.reply().empty());
    CHECK(rank->add("sum", 0) == 1);
  }
  SECTION("changed") {
    std::string frame = client.to_server->seal(add_one("sum"));
    frame[kHeaderBytes + 6] ^= 1;
    client.send(frame);
    CHECK(client.reply().empty());
    CHECK(rank->add("sum", 0) == 1);
  }
  SECTION("too long") {
    client.send(std::string("\xff\xff\xff\xff", 4));
    CHECK(client.is_closed());
  }
  CHECK(rank->getNumKeys() == 1);
}

TEST_CASE("a client cannot send while its request waits", "[store]") {
  const ServedStore served;
  RawClient client(served);
  client.join(served);
  REQUIRE(client.send(client.to_server->seal(Writer(Operation::kGet).number(60000).text("later").finish())));
  CHECK(!client.is_readable(std::chrono::milliseconds(50)));
  client.send("x");
  CHECK(client.is_closed());
}

TEST_CASE("malformed requests end the connection", "[store]") {
  const ServedStore served;
  const auto rank = served.join();
  const std::vector<std::string> requests = {
      "",
      "\x63",
      Writer(Operation::kSet).text("key").finish(),
      Writer(Operation::kSet).text("key").text("value").finish() + "x",
      Writer(Operation::kAdd).text("key").finish(),
      Writer(Operation::kAdd).text("key").number(1).finish() + "x",
      std::string(1, static_cast<char>(Operation::kCheck)) + "\xff\xff\xff\xff",
      Writer(Operation::kCompareSet).text("key").text("").finish(),
  };
  for (const std::string& request : requests) {
    CAPTURE(request);
    RawClient client(served);
    client.join(served);
    client.send(client.to_server->seal(request));
    CHECK(client.receive(1).empty());
  }
  CHECK(rank->getNumKeys() == 0);
}

namespace {

/// Sessions with random changes.
class DoorFuzzer {
 public:
  explicit DoorFuzzer(unsigned seed) : random_(seed) { rank_->set("canary", "sings"); }

  /// Plays one session. A session without a valid frame must not change the store.
  void play() {
    RawClient client(served_);
    const std::int64_t keys = rank_->getNumKeys();
    const std::size_t kind = below(6);
    switch (kind) {
      case 0:  // Random bytes, with or without a valid beginning.
        client.send((below(2) ? client.hello().substr(0, below(kHelloBytes)) : "") + noise(below(400)));
        break;
      case 1: {  // A stranger with a changed hello or proof.
        if (below(2)) {
          client.send(changed(client.hello()) + noise(below(100)));
          break;
        }
        client.send(client.hello());
        client.send(changed(client.proof(served_.key, served_.run)) + noise(below(2) * below(100)));
        break;
      }
      case 2:  // A valid handshake, then noise.
        client.join(served_);
        client.send(noise(below(300)));
        break;
      case 3: {  // A changed frame after valid ones.
        client.join(served_);
        for (std::size_t valid = below(3); valid > 0; --valid) ask(client, request());
        client.send(changed(client.to_server->seal(request())));
        break;
      }
      case 4:  // A client with the key that sends any request.
        client.join(served_);
        send_in_pieces(client, client.to_server->seal(below(2) ? changed(request()) : noise(below(100))));
        break;
      default:  // A client that leaves at any byte.
        client.join(served_);
        send_in_pieces(client, client.to_server->seal(request()).substr(0, below(60)));
    }
    client.end_sending();
    REQUIRE(client.is_closed());
    if (kind <= 2) REQUIRE(rank_->getNumKeys() == keys);
  }

  void check() {
    REQUIRE(rank_->get_to_str("canary") == "sings");
    REQUIRE(served_.join()->add("checks", 1) == ++checks_);
  }

 private:
  std::size_t below(std::size_t limit) { return random_() % limit; }

  std::string noise(std::size_t count) {
    std::string text(count, '\0');
    for (char& byte : text) byte = static_cast<char>(random_());
    return text;
  }

  /// Changes, inserts, removes or repeats bytes; never returns the same text.
  std::string changed(const std::string& text) {
    std::string result = text;
    do {
      const std::size_t at = below(result.size() + 1);
      switch (below(4)) {
        case 0:
          if (at < result.size()) result[at] = static_cast<char>(result[at] ^ (1 << below(8)));
          break;
        case 1:
          result.insert(at, noise(1 + below(8)));
          break;
        case 2:
          result.erase(at, 1 + below(8));
          break;
        default:
          result += result.substr(at);
      }
    } while (result == text || below(3) == 0);
    return result;
  }

  /// No change makes "canary" of one of these keys.
  std::string request() {
    const std::string key = "fuzz" + std::to_string(below(20));
    switch (below(8)) {
      case 0:
        return Writer(Operation::kSet).text(key).text(noise(below(50))).finish();
      case 1:
        return Writer(Operation::kCompareSet).text(key).text("").text(noise(below(50))).finish();
      case 2:
        return Writer(Operation::kAppend).text(key).text("x").finish();
      case 3:
        return Writer(Operation::kDelete).text(key).finish();
      case 4:
        return Writer(Operation::kCheck).text(key).text("other").finish();
      case 5:
        return Writer(Operation::kGet).number(static_cast<std::int64_t>(1 + below(3))).text(key).finish();
      case 6:
        return Writer(Operation::kCount).finish();
      default:
        return add_one(key);
    }
  }

  void ask(RawClient& client, const std::string& request) {
    client.send(client.to_server->seal(request));
    REQUIRE(!client.reply().empty());
  }

  void send_in_pieces(const RawClient& client, std::string_view text) {
    while (!text.empty()) {
      const std::size_t count = std::min(1 + below(text.size()), text.size());
      if (!client.send(text.substr(0, count))) return;
      text.remove_prefix(count);
    }
  }

  std::mt19937 random_;
  ServedStore served_;
  c10::intrusive_ptr<KeyedStore> rank_ = served_.join();
  std::int64_t checks_ = 0;
};

std::size_t open_descriptors() {
  const auto folder = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(folder), end(folder)));
}

}  // namespace

TEST_CASE("random and changed sessions do not harm the store", "[store]") {
  int seconds = 0;
  if (const char* text = std::getenv("DDPKIT_STORE_FUZZ_SECONDS")) REQUIRE(ddpkit::parse_number(text, seconds));
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  const unsigned seed = seconds > 0 ? std::random_device()() : 1;
  CAPTURE(seed);
  DoorFuzzer fuzzer(seed);
  const std::size_t descriptors = open_descriptors();
  int sessions = 0;
  for (; sessions < 2000 || Clock::now() < end; ++sessions) {
    CAPTURE(sessions);
    fuzzer.play();
    if (sessions % 50 == 0) fuzzer.check();
  }
  fuzzer.check();
  CHECK(open_descriptors() <= descriptors + 4);
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  if (seconds > 0) std::cout << sessions << " sessions, " << usage.ru_maxrss / 1024 << " MiB" << std::endl;
}
