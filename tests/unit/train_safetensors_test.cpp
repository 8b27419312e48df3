#include <torch/torch.h>

#include <ddpkit/error.h>
#include <ddpkit/train/safetensors.h>

#include "support/catch.h"
#include "support/folder.h"

using namespace ddpkit::train;
using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

/// Returns a file of this header and `bytes` bytes of data.
std::string file_of(const std::string& header, std::size_t bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(header.size() >> (8 * i)));
  return file + header + std::string(bytes, '\1');
}

}  // namespace

TEST_CASE("safetensors come back, largest elements first", "[safetensors]") {
  const Folder folder;
  torch::manual_seed(2);
  const StateDict tensors{{"half", torch::randn({3}).to(torch::kHalf)},
                          {"b", torch::randn({2, 3}).t()},
                          {"a", torch::randn({2})},
                          {"flags", torch::ones({3}, torch::kBool)},
                          {"count", torch::tensor(std::int64_t{7})},
                          {"empty", torch::empty({0, 4})}};
  save_safetensors(folder / "t.safetensors", tensors);
  const StateDict loaded = load_safetensors(folder / "t.safetensors");
  std::vector<std::string> names;
  for (const auto& [key, value] : loaded) {
    names.push_back(std::get<std::string>(key));
    CHECK(torch::equal(value.to_tensor(), tensors.at(key).to_tensor()));
    CHECK(value.to_tensor().is_contiguous());
  }
  CHECK(names == std::vector<std::string>{"count", "a", "b", "empty", "half", "flags"});
  const std::string file = read_file(folder / "t.safetensors");
  CHECK(static_cast<unsigned char>(file[0]) % 8 == 0);
  CHECK(file.substr(8, 38) == R"({"__metadata__":{"format":"pt"},"count)");
}

TEST_CASE("safetensors hold complex numbers and floats of 8 and 4 bits", "[safetensors]") {
  const Folder folder;
  const auto bytes = torch::arange(256).to(torch::kByte).reshape({32, 8});
  StateDict tensors{{"conj", torch::randn({3}, torch::kComplexFloat).conj()}};
  for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz,
                                     at::kFloat8_e8m0fnu, at::ScalarType::Float4_e2m1fn_x2})
    tensors[c10::toString(dtype)] = bytes.view(dtype);
  save_safetensors(folder / "t", tensors);
  CHECK_THAT(read_file(folder / "t"), ContainsSubstring(R"("dtype":"F4","shape":[32,16])"));
  for (const auto& [key, value] : load_safetensors(folder / "t")) {
    const at::Tensor &after = value.to_tensor(), &before = tensors.at(key).to_tensor();
    CAPTURE(describe(key));
    CHECK(after.scalar_type() == before.scalar_type());
    CHECK((after.is_complex() ? torch::equal(after, before) : torch::equal(after.view(torch::kByte), bytes)));
  }
  INFO("Fields that a later version may add.");
  write_file(folder / "more", file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"about":"x"}})", 2));
  CHECK(load_safetensors(folder / "more").size() == 1);
}

TEST_CASE("tensors that safetensors cannot hold are refused before anything is written", "[safetensors]") {
  const Folder folder;
  const auto refuse = [&](const StateDict& tensors) {
    CHECK_THROWS_AS(save_safetensors(folder / "t", tensors), ddpkit::InvalidArgument);
  };
  refuse({{"x", 1}});
  refuse({{1, torch::ones({1})}});
  refuse({{"x", torch::ones({2}).to_sparse()}});
  refuse({{"x", torch::ones({2}, torch::kComplexDouble)}});
  refuse({{"__metadata__", torch::ones({2})}});
  refuse({{"\xff", torch::ones({2})}});
  CHECK(ddpkit::testing::names_in(folder.path()).empty());
}

TEST_CASE("a damaged safetensors file is refused in one sentence", "[safetensors]") {
  const Folder folder;
  const auto refuse = [&](const std::string& bytes, const std::string& reason) {
    write_file(folder / "bad", bytes);
    try {
      load_safetensors(folder / "bad");
      FAIL("no error for " << bytes.substr(8));
    } catch (const ddpkit::InvalidArgument& error) {
      CHECK_THAT(error.what(), ContainsSubstring("bad: ") && ContainsSubstring(reason));
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
  };
  const std::string a = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  write_file(folder / "good", file_of(a, 8));
  CHECK(load_safetensors(folder / "good").size() == 1);
  for (std::size_t cut = 1; cut < file_of(a, 8).size(); cut += 3)
    refuse(file_of(a, 8).substr(0, file_of(a, 8).size() - cut), "");
  refuse(file_of(a, 9), "take 8 bytes, and 9 are there");
  std::string huge = file_of(a, 8);
  huge[7] = 0x10;  // Slightly more than 2^60.
  refuse(huge, "100000000 are the most");
  huge[7] = 0;
  huge[3] = 1;
  refuse(huge, "truncated");
  refuse(file_of("[1]", 0), "no JSON object");
  refuse(file_of("{\"a\":", 0), "no JSON");
  refuse(file_of(R"({"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}})", 3), "half a byte");
  refuse(file_of(R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8), "F31");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8), "takes 12 bytes");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8), "entry of tensor a");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8), "entry of tensor a");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0),
         "entry of tensor a");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8), "specifies 8 to 0");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", 8), "begins at byte 8");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[2]}})", 8), "entry of tensor a");
  refuse(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                 8),
         "tensor b begins at byte 4");
  refuse(file_of(R"({"a":)" + std::string(1000000, '[') + std::string(1000000, ']') + "}", 0), "nested too deeply");
  CHECK_THROWS_WITH(load_safetensors(folder / "none"), ContainsSubstring("No such file"));
}
