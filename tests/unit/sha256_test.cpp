#include "comm/store/sha256.h"

#include <string>

#include "support/catch.h"

using ddpkit::store::bytes_of;
using ddpkit::store::Digest;
using ddpkit::store::Hmac;
using ddpkit::store::sha256;
using ddpkit::store::Sha256;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const unsigned byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace

TEST_CASE("SHA-256 gives the digests of FIPS 180-4", "[store]") {
  CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmn"
                   "opqrstnopqrstu")) == "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(hex(sha256(std::string(1000000, 'a'))) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("SHA-256 does not depend on how a text of any length is divided", "[store]") {
  Sha256 of_all;  // The digests of all lengths, as Python's hashlib gives them.
  for (std::size_t length = 0; length < 300; ++length) {
    std::string text;
    for (std::size_t i = 0; i < length; ++i) text += static_cast<char>(7 * i + length);
    Sha256 divided;
    for (std::size_t begin = 0; begin < length; begin += 1 + begin % 70)
      divided.add(std::string_view(text).substr(begin, 1 + begin % 70));
    const Digest digest = divided.finish();
    CHECK(digest == sha256(text));
    of_all.add(bytes_of(digest));
  }
  CHECK(hex(of_all.finish()) == "d5238871a46ac4a1a75ac3fb19d645b0b3b9e5f35f5f720e2b240d605c6b694e");
}

TEST_CASE("HMAC-SHA256 gives the codes of RFC 4231", "[store]") {
  const auto code = [](const std::string& key, const std::string& text) {
    const std::string whole = hex(Hmac(key).of({text}));
    CHECK(hex(Hmac(key).of({text.substr(0, 3), text.substr(3)})) == whole);
    return whole;
  };
  CHECK(code(std::string(20, '\x0b'), "Hi There") ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(code("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(code(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK(code(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(code(std::string(131, '\xaa'),
             "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
             "hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}
